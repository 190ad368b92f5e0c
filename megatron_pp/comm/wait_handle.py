"""Handles of posted sends and receives. A handle owns the bytes of its transfer until the transfer is done."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch

from megatron_pp.comm.transport import Transport, Work
from megatron_pp.errors import CommunicatorClosedError, P2PError, P2PTimeoutError, P2PTransferError

Tensors = torch.Tensor | list[torch.Tensor]


class Core(Protocol):
    """What a handle uses of the communicator that posted its transfer (``communicator.P2PCore``)."""

    transport: Transport
    rank: int
    timeout: timedelta | None
    pending: set[WaitHandle]
    under_guard: bool

    @property
    def closed(self) -> bool: ...


class WaitHandle:
    """One posted message (a tensor or a list of tensors).

    Until ``wait()`` has returned, the handle, and the communicator that keeps it, hold the tensors: dropping the handle
    or deallocating what was sent is harmless. ``tensor`` is what is being received, None for a send."""

    __slots__ = ("__weakref__", "_channel", "_core", "_error", "_held", "_kind", "_peer", "_works", "tensor")

    def __init__(
        self,
        core: Core,
        works: tuple[Work, ...],
        held: object,
        tensor: Tensors | None,
        kind: str,
        peer: int = -1,
        channel: str = "",
    ) -> None:
        self._core = core
        self._works: tuple[Work, ...] | None = works
        self._held = held
        self._error: P2PError | None = None
        self.tensor = tensor
        self._kind = kind
        self._peer = peer
        self._channel = channel
        core.pending.add(self)

    @property
    def what(self) -> str:
        """In words, for errors."""
        return self._kind if self._peer < 0 else f"{self._kind} on channel {self._channel}, with rank {self._peer}"

    def wait(self) -> None:
        """Return when the transfer is done (on CUDA: make the current stream wait for it, not the host); waiting again
        is a no-op. Raises P2PTimeoutError after ``config.p2p_timeout`` seconds (gloo), CommunicatorClosedError where
        the communicator or its process group is gone, P2PTransferError where the transfer failed."""
        works = self._works
        if works is None:
            if self._error is not None:
                raise self._error
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
            raise self._error from error
        self._works = None
        self._held = None
        core.pending.discard(self)

    def is_completed(self) -> bool:
        """Whether the transfer is known to be done; on gloo, a small one only once it was waited for."""
        return self._works is None or all(work.is_completed() for work in self._works)


def _named(error: Exception, what: str, core: Core) -> P2PError:
    """The error a user sees, for what the transport raised."""
    if isinstance(error, P2PError):
        return error
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
