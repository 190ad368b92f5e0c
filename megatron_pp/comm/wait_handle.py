"""Handles of posted sends and receives. A handle owns the bytes of its transfer until the transfer is done."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.comm.transport import Work
from megatron_pp.errors import CommunicatorClosedError, P2PError, P2PTimeoutError, P2PTransferError, SendBufferError

if TYPE_CHECKING:
    from megatron_pp.comm.parts import HandlesCore

logger = logging.getLogger("megatron_pp")
UNWATCHED = -1
Tensors = torch.Tensor | list[torch.Tensor]


class WaitHandle:
    """One posted message (a tensor or a list of tensors).

    Until ``wait()`` has returned, the handle, and the communicator that keeps it, hold the tensors: dropping the handle
    or deallocating what was sent is harmless. ``tensor`` is what is being received, None for a send.

    ``version``: of what is being sent, when it was posted (``version_of``); UNWATCHED: nobody asks.
    ``together``: the watched sends of a grouped call, which is over as a whole."""

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
        self._error: P2PError | None = None  # never raised itself: a traceback would lead back to this handle
        self.tensor = tensor
        self._kind = kind
        self._peer = peer
        self._channel = channel
        self.version = version
        self.together: Sequence[WaitHandle] = ()
        core.pending.add(self)

    @property
    def what(self) -> str:
        """The transfer in words, for errors."""
        return self._kind if self._peer < 0 else f"{self._kind} on channel {self._channel}, with rank {self._peer}"

    def wait(self) -> None:
        """Return when the transfer is done (on CUDA: make the current stream wait for it, not the host); waiting again
        is a no-op. Raises P2PTimeoutError after ``config.p2p_timeout`` seconds (gloo), CommunicatorClosedError where
        the communicator or its process group is gone, P2PTransferError where the transfer failed, SendBufferError where
        what was being sent has been written to."""
        works = self._works
        if works is None:
            if self._error is not None:
                raise copy.copy(self._error)
            return
        core = self._core
        timeout = None if core.under_guard else core.timeout
        try:
            if not core.under_guard and core.transport.is_gone():
                raise RuntimeError("the group is gone")  # gloo would wait for its timeout first
            for work in works:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
        except Exception as error:
            self._works = None
            self._error = _named(error, self.what, core)
            raise copy.copy(self._error) from error
        held: Any = self._held
        self._held = None
        self._works = None
        core.pending.discard(self)
        # On the hot path; of several tensors, or a subclass, _compare() asks.
        if self.version != UNWATCHED and (held.__class__ is not torch.Tensor or held._version != self.version):
            self._compare(held)
        if self.together:
            together, self.together = self.together, ()
            for one in together:
                one.is_over()
        if self._error is not None:
            raise copy.copy(self._error)

    def is_over(self) -> None:
        """The grouped call was waited for: what is written from now on was not sent. An error is raised by ``wait``."""
        held: Any = self._held
        if held is not None and (held.__class__ is not torch.Tensor or held._version != self.version):
            with suppress(SendBufferError):
                self.check()
        self.version = UNWATCHED

    def check(self) -> None:
        """Compare what is being sent a last time: its transfer is known to be over. Raises SendBufferError."""
        if self.version != UNWATCHED and self._held is not None:
            self._compare(self._held)
            self.version = UNWATCHED

    def _compare(self, held: Any) -> None:
        if version_of(held) == self.version:
            return
        if not is_whole(held):
            _warn_of_parts(self.what)
            return
        self._error = written_to(self._core.rank, f"what a {self.what}, carries")
        raise copy.copy(self._error)

    def is_completed(self) -> bool:
        """Whether the transfer is known to be done; on gloo, a small one only once it was waited for."""
        return self._works is None or all(work.is_completed() for work in self._works)


def written_to(rank: int, what: str, **place: Any) -> SendBufferError:
    """The error of ``rank`` for ``what``, in words; ``place``: further fields."""
    return SendBufferError(
        f"pipeline rank {rank}: {what} was written to while it was being sent, and the peer may have got the new "
        "values: by an in-place operation, or as memory that a later microbatch uses again (a static output buffer, a "
        "batch that the data iterator refills). Send a clone, or new memory for each microbatch",
        rank=rank,
        **place,
    )


def version_of(sent: torch.Tensor | Sequence[torch.Tensor]) -> int:
    """How often autograd has counted writes to the memory of ``sent``; UNWATCHED where it does not count
    (``inference_mode``)."""
    total = 0
    for one in (sent,) if isinstance(sent, torch.Tensor) else sent:
        if one.is_inference():
            return UNWATCHED
        total += one._version
    return total


def is_whole(sent: torch.Tensor | Sequence[torch.Tensor]) -> bool:
    """Whether ``sent`` is all of its memory: else a write that was counted may have gone elsewhere."""
    tensors = (sent,) if isinstance(sent, torch.Tensor) else sent
    return all(one.untyped_storage().nbytes() == one.numel() * one.element_size() for one in tensors)


@lru_cache(maxsize=1)
def _warn_of_parts(what: str) -> None:
    """Once per process."""
    logger.warning(
        "%s: it sends a part of a larger tensor, which was written to before the send was done; where that was the "
        "part that is sent, the peer may have got the new values. Send a clone, or see with p2p_debug which it was",
        what,
    )


def _named(error: Exception, what: str, core: HandlesCore) -> P2PError:
    """The error a user sees, for what the transport raised."""
    if isinstance(error, P2PError):
        return copy.copy(error)
    text = str(error)
    where = f"pipeline rank {core.rank}, {what}"
    if core.closed or core.transport.is_gone():
        return CommunicatorClosedError(
            f"{where}: the communicator or its process group was closed before the transfer was waited for"
        )
    if "Timed out" in text or "timeout" in text.lower():
        seconds = core.timeout.total_seconds() if isinstance(core.timeout, timedelta) else "the process group's"
        return P2PTimeoutError(
            f"{where}: not done after {seconds} s (config.p2p_timeout); the peer never posted its end, or is gone: "
            f"{text}"
        )
    return P2PTransferError(f"{where}: the transfer failed: {text}")
