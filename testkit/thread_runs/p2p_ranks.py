"""Ranks as threads that exchange messages by ``P2PCommunicator``, in every mode of communication."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup
from testkit.thread_runs.step_runs import Rank, pipeline

SHAPE = (3, 2, 4)
# The modes of communication, which must all give the same results.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batched": {"batch_p2p_comm": True},
    "variable": {"variable_seq_lengths": True},
    "variable batched": {"variable_seq_lengths": True, "batch_p2p_comm": True},
    "shared": {"p2p_channels": "shared"},
    "shared batched": {"p2p_channels": "shared", "batch_p2p_comm": True},
    "shared variable": {"p2p_channels": "shared", "variable_seq_lengths": True},
    "debug": {"p2p_debug": True},
}
every_way = pytest.mark.parametrize("way", WAYS)
# If shapes are exchanged as a batch, both sides must be in matching calls, as Megatron's always are.
SHAPES_IN_BATCHES = ("variable batched", "shared variable")
every_size = pytest.mark.parametrize("size", [2, 3])


def config_of(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"pipeline_dtype": torch.float32, "p2p_timeout": 10.0, **fields})


def on_ranks(size: int, body: Callable[[P2PCommunicator], Any], **fields: Any) -> list[Any]:
    """Run ``body(communicator)`` on each of ``size`` ranks. Returns the results. No message may be left in flight."""

    def run(rank: Rank) -> Any:
        result = body(rank.communicator)
        assert not rank.communicator.pending
        return result

    return pipeline(size, 1, 0, run, timeout=20.0, **{"p2p_timeout": 10.0, **fields})


def filled(value: float, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.full(shape, float(value))


def same(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)


class NothingMayPass(MemoryNetwork):
    """A network on which any posted operation fails the test."""

    def post(self, *args: Any) -> Any:
        raise AssertionError("an operation was posted")


def lonely(**fields: Any) -> P2PCommunicator:
    """The communicator of rank 1 of 3, which has both neighbours."""
    return P2PCommunicator(ThreadGroup(1, 3), config_of(**fields), NothingMayPass(3).transport(1))
