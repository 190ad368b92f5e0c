"""The errors of a transfer that failed, and of a tensor that was written to while it was being sent."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.errors import CommunicatorClosedError, P2PError, P2PTimeoutError, P2PTransferError, SendBufferError

if TYPE_CHECKING:
    from megatron_pp.comm.parts import HandlesCore

logger = logging.getLogger("megatron_pp")


def named(error: Exception, what: str, core: HandlesCore) -> P2PError:
    """The error that the user sees in place of ``error``, which the transport raised."""
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


def written_to(rank: int, what: str, **place: Any) -> SendBufferError:
    """The error that ``what`` on ``rank``, in words, was written to. ``place``: further fields of the error."""
    return SendBufferError(
        f"pipeline rank {rank}: {what} was written to while it was being sent, so the peer may have received the new "
        "values. The cause is an in-place operation, or memory that a later microbatch reuses (a static output buffer, "
        "a batch that the data iterator refills). Send a clone, or new memory for each microbatch",
        rank=rank,
        **place,
    )


def is_whole(sent: torch.Tensor | Sequence[torch.Tensor]) -> bool:
    """Whether ``sent`` fills its memory. If not, a counted write may have changed another part of the memory."""
    tensors = (sent,) if isinstance(sent, torch.Tensor) else sent
    return all(one.untyped_storage().nbytes() == one.numel() * one.element_size() for one in tensors)


@lru_cache(maxsize=1)
def warn_of_parts(what: str) -> None:
    """Warn once per process of a write that may have changed a tensor while it was sent."""
    logger.warning(
        "%s: it sends a part of a larger tensor that was written to before the send was done. If the write was to the "
        "sent part, the peer may have received the new values. Send a clone, or set p2p_debug to know which it was",
        what,
    )
