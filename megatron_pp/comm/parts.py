"""Protocols, for type checkers only: what modules of this folder use of modules that they cannot import."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch

from megatron_pp.comm.transport import Transport


class HandlesCore(Protocol):
    """The part that a handle uses of the communicator that keeps it (``communicator.py``: ``P2PCore``)."""

    rank: int
    transport: Transport
    timeout: timedelta | None
    under_guard: bool
    pending: set[Any]

    @property
    def closed(self) -> bool: ...


class MessageCheck(Protocol):
    """Debug mode's description of a message, in integers: sent ahead of the message and compared by the receiver."""

    stamp_length: int

    def stamp(self, dtype: torch.dtype, member: int = 0) -> tuple[int, ...]:
        """The description of the current instruction's message; ``member``: its place within a batch."""

    def check(self, peer: int, received: list[int], shape: list[int], expected: Any, expected_shape: Any) -> None:
        """Raises WireMismatchError if ``peer`` announced another message than the expected one."""

    def within(self, source: Any) -> AbstractContextManager[None]:
        """The context in which ``source`` executes its plan."""
