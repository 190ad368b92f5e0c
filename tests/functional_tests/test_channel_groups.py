"""Large messages on gloo go through groups of two, one per one-way channel, and are posted by threads: the numbers are
those of one process, channels can be made whatever other groups a rank is in, and nothing of them is left.

NCCL makes its channels in the same way.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pp.plan.costs.transports import GLOO_DETACHED_BYTES
from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import HIDDEN, ToyData, ToyResult, merged, reference_run, toy_config
from tests.harness.processes import run_processes

SIZE = 4
FIELDS: dict[str, tuple[int, dict[str, Any]]] = {
    "overlap": (2, {"overlap_p2p_comm": True}),
    "plain": (1, {}),
    "batched": (2, {"batch_p2p_comm": True}),
    "variable": (1, {"overlap_p2p_comm": True, "variable_seq_lengths": True}),
    "zb_v": (2, {"overlap_p2p_comm": True, "pipeline_schedule": "zb_v"}),
}


def data_of(name: str) -> ToyData:
    length = GLOO_DETACHED_BYTES // (4 * HIDDEN * 2) + 1
    return ToyData(5, seq_length=length, variable=name == "variable")


def rank_main(rank: int, size: int) -> list[tuple[str, ToyResult, int, list[str]]]:
    if rank < 2:  # the ranks are in different numbers of groups
        dist.new_group([0, 1], use_local_synchronization=True)
    results = []
    for name in ("overlap", *FIELDS):  # the first one twice: channels are made again under names that were used
        chunks, fields = FIELDS[name]
        config = toy_config(virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, **fields)
        communicator = communicator_for(dist.group.WORLD, config)
        result = run_rank(rank, size, chunks, data_of(name), config, communicator)
        channels = len(communicator.transport._channels)  # type: ignore[attr-defined]
        close_communicators()
        results.append((name, result, channels, senders()))
    return results


def senders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megatron_pp sends")]


@pytest.fixture(scope="module")
def per_rank() -> list[Any]:
    return run_processes(rank_main, SIZE, timeout=300.0, start_method="mixed")


def test_numbers_are_those_of_one_process(per_rank: list[Any]) -> None:
    for results in zip(*per_rank, strict=True):
        name = results[0][0]
        expected = reference_run(SIZE * FIELDS[name][0], data_of(name))
        assert merged([result for _, result, _, _ in results]).difference(expected) == 0.0, name


def test_every_rank_has_the_channels_of_its_edges(per_rank: list[Any]) -> None:
    """Two edges at each rank in a loop and inside a line, one at its ends; two kinds of message along each."""
    for results in zip(*per_rank, strict=True):
        in_a_line = [2, 4, 4, 2]
        both_ways = [2 * n for n in in_a_line]  # a V goes down and up again
        around = [4] * SIZE
        unknown = [0] * SIZE  # sizes that travel with the messages are not known when channels are made
        wanted = {"plain": in_a_line, "zb_v": both_ways, "variable": unknown}.get(results[0][0], around)
        assert [channels for _, _, channels, _ in results] == wanted, results[0][0]


def test_their_threads_end(per_rank: list[Any]) -> None:
    assert [left for rank in per_rank for _, _, _, left in rank if left] == []
