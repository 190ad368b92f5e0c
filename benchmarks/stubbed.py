"""A rank alone in one process. Its sends and receives return at once, so that only the engine's own time remains.

There are two kinds of stubs. "calls": the functions that an engine calls to send and receive do nothing. These are
torch.distributed.isend, irecv and batch_isend_irecv for the peers, and our Transport for our engine. "group": torch's
fake process group does nothing, and an engine's own calls down to the group are counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_pp.comm.collectives import Done
from megatron_pp.comm.transport import P2PRequest, Transport

STUBS = ("calls", "group")


class StubTransport(Transport):
    """A transport that transfers nothing: every operation is complete when it is posted."""

    device = torch.device("cpu")

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._work = Done()

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Done:
        return self._work

    irecv = isend

    def batch(self, requests: Sequence[P2PRequest]) -> list[Done]:
        return [self._work] * len(requests)


@contextlib.contextmanager
def stubbed_group(rank: int, size: int, stub: str) -> Iterator[tuple[Any, Any]]:
    """(group, our transport) of ``rank`` in a world of ``size``, which transfer nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    # Before their first step torch's stages vote on whether their shapes are known. Here all of them vote yes.
    with patch.object(dist, "recv", lambda tensor, *args, **kwargs: tensor.fill_(1)):
        try:
            with _stubbed_calls() if stub == "calls" else contextlib.nullcontext():
                yield dist.group.WORLD, StubTransport(rank, size) if stub == "calls" else None
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _stubbed_calls() -> Iterator[None]:
    work = Done()

    def post(*args: Any, **kwargs: Any) -> Done:
        return work

    def send(*args: Any, **kwargs: Any) -> Done:
        return work

    def batch(operations: Sequence[Any]) -> list[Done]:
        return [work]

    # P2POp accepts only the two original functions.
    unchecked = patch.object(dist.distributed_c10d, "_check_op", lambda op: None)
    with patch.multiple(dist, isend=send, irecv=post, batch_isend_irecv=batch), unchecked:
        yield
