"""What modules of this room see of others that they cannot import. For type checkers alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch

from megatron_pp.comm.transport import Transport


class HandlesCore(Protocol):
    """What a handle sees of the communicator that keeps it (``communicator.py``: ``P2PCore``)."""

    rank: int
    transport: Transport
    timeout: timedelta | None
    under_guard: bool
    pending: set[Any]

    @property
    def closed(self) -> bool: ...


class MessageCheck(Protocol):
    """What debug mode announces of a message ahead of it, in whole numbers, and compares at its other end."""

    stamp_length: int

    def stamp(self, dtype: torch.dtype, member: int = 0) -> tuple[int, ...]:
        """Of the message of the current instruction; ``member``: its place within a batch."""

    def check(self, peer: int, received: list[int], shape: list[int], expected: Any, expected_shape: Any) -> None:
        """Raises WireMismatchError where ``peer`` announced another message."""

    def within(self, source: Any) -> AbstractContextManager[None]:
        """While ``source`` executes its plan."""
