"""Transfers of shapes beside NCCL: from host to host, over gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from megatron_pp.comm.channels import ChannelGroups


class ShapeTransfer:
    """The work of a shape that is sent ahead of a tensor. A tensor is received only once its shape is known, so whether
    a message is done is read from its tensors, not from this work."""

    __slots__ = ("_groups", "_work")

    def __init__(self, work: Any, groups: ChannelGroups) -> None:
        self._work = work
        self._groups = groups

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the host, for at most as long as NCCL would wait."""
        return self._work.wait(self._groups.timeout if timeout is None else timeout)

    def is_completed(self) -> bool:
        return True
