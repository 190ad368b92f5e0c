"""Handles of posted sends and receives. A handle owns the bytes of its transfer until the transfer is done."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.comm.transport import Work
from megatron_pp.errors import P2PError, SendBufferError

if TYPE_CHECKING:
    from megatron_pp.comm.parts import HandlesCore

UNWATCHED = -1
Tensors = torch.Tensor | list[torch.Tensor]


class WaitHandle:
    """One posted message (a tensor or a list of tensors).

    The handle, and the communicator that keeps it, hold the tensors until ``wait()`` has returned. So dropping the
    handle or deallocating a sent tensor is harmless. ``tensor`` is the received tensor, None for a send.

    ``version``: ``version_of`` the sent tensor when the send was posted; UNWATCHED: writes are not checked.
    ``together``: the watched sends of a grouped call, which ends as a whole."""

    __slots__ = (
        *("__weakref__", "_channel", "_core", "_error", "_held", "_kind", "_peer", "_works"),
        *("tensor", "together", "version"),
    )

    def __init__(
        self,
        core: HandlesCore,
        works: tuple[Work, ...],
        held: object,
        tensor: Tensors | None,
        kind: str,
        peer: int = -1,
        channel: str = "",
        version: int = UNWATCHED,
    ) -> None:
        self._core = core
        self._works: tuple[Work, ...] | None = works
        self._held = held
        self._error: P2PError | None = None  # copies of it are raised: a traceback would hold this handle
        self.tensor = tensor
        self._kind = kind
        self._peer = peer
        self._channel = channel
        self.version = version
        self.together: Sequence[WaitHandle] = ()
        core.pending.add(self)

    @property
    def what(self) -> str:
        """The transfer in words, for messages of errors."""
        return self._kind if self._peer < 0 else f"{self._kind} on channel {self._channel}, with rank {self._peer}"

    def wait(self) -> None:
        """Return when the transfer is done. On CUDA the current stream waits for it, not the host. A second call does
        nothing. Raises P2PTimeoutError after ``config.p2p_timeout`` seconds (gloo), CommunicatorClosedError if the
        communicator or its process group is gone, P2PTransferError if the transfer failed, and SendBufferError if the
        tensor was written to while it was being sent."""
        works = self._works
        if works is None:
            if self._error is not None:
                raise copy.copy(self._error)
            return
        core = self._core
        timeout = None if core.under_guard else core.timeout
        try:
            if not core.under_guard and core.transport.is_gone():
                raise RuntimeError("the group is gone")  # gloo would raise only after its timeout
            for work in works:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
        except Exception as error:
            self._works = None
            from megatron_pp.comm.failed_transfers import named

            self._error = named(error, self.what, core)
            raise copy.copy(self._error) from error
        held: Any = self._held
        self._held = None
        self._works = None
        core.pending.discard(self)
        # On the hot path. _compare() handles several tensors, and subclasses of Tensor.
        if self.version != UNWATCHED and (held.__class__ is not torch.Tensor or held._version != self.version):
            self._compare(held)
        if self.together:
            together, self.together = self.together, ()
            for one in together:
                one.is_over()
        if self._error is not None:
            raise copy.copy(self._error)

    def is_over(self) -> None:
        """Compare the sent tensor when its grouped call was waited for: later writes do no harm. ``wait`` raises."""
        held: Any = self._held
        if held is not None and (held.__class__ is not torch.Tensor or held._version != self.version):
            with suppress(SendBufferError):
                self.check()
        self.version = UNWATCHED

    def check(self) -> None:
        """Compare the sent tensor a last time, when its transfer is known to be over. Raises SendBufferError."""
        if self.version != UNWATCHED and self._held is not None:
            self._compare(self._held)
            self.version = UNWATCHED

    def _compare(self, held: Any) -> None:
        if version_of(held) == self.version:
            return
        from megatron_pp.comm.failed_transfers import is_whole, warn_of_parts, written_to

        if not is_whole(held):
            warn_of_parts(self.what)
            return
        self._error = written_to(self._core.rank, f"the tensor of a {self.what},")
        raise copy.copy(self._error)

    def is_completed(self) -> bool:
        """Whether the transfer is known to be done. On gloo a small transfer is known only after it was waited for."""
        return self._works is None or all(work.is_completed() for work in self._works)


def version_of(sent: torch.Tensor | Sequence[torch.Tensor]) -> int:
    """How many writes to the memory of ``sent`` autograd has counted; UNWATCHED if it does not count
    (``inference_mode``)."""
    total = 0
    for one in (sent,) if isinstance(sent, torch.Tensor) else sent:
        if one.is_inference():
            return UNWATCHED
        total += one._version
    return total
