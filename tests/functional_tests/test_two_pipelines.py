"""Two pipelines over the same ranks: messages, agreements and failures of one never reach the other, in whatever order
each rank begins with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.comm.channels import pipeline_name
from megatron_pp.plan.costs.transports import GLOO_DETACHED_BYTES
from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import HIDDEN, ToyData, ToyResult, merged, reference_run, toy_config
from tests.harness.processes import run_processes

STEPS = 2
LARGE = GLOO_DETACHED_BYTES // (4 * HIDDEN * 2) + 1  # sequence length of a message that gets a channel of its own
APART = 0.3  # seconds between the first steps of the two pipelines on one rank


def data_of(pipeline: int, step: int, microbatches: int) -> ToyData:
    """Each step of each pipeline has microbatches of its own."""
    return ToyData(microbatches, seq_length=LARGE, first=1000 * pipeline + 100 * step)


Pipeline = tuple[int, int, dict[str, Any]]  # chunks, microbatches, config fields

SAME: list[Pipeline] = [(1, 4, {}), (1, 4, {})]
DIFFERENT: list[Pipeline] = [(1, 4, {}), (2, 8, {"overlap_p2p_comm": True})]


def _steps(rank: int, size: int, number: int, group: dist.ProcessGroup, pipeline: Pipeline) -> list[ToyResult]:
    chunks, microbatches, fields = pipeline
    config = toy_config(virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, **fields)
    communicator = communicator_for(group, config)
    data = (data_of(number, step, microbatches) for step in range(STEPS))
    return [run_rank(rank, size, chunks, each, config, communicator) for each in data]


def in_threads(rank: int, size: int, pipelines: list[Pipeline]) -> list[list[ToyResult]]:
    """A thread for each pipeline; even and odd ranks begin with different ones."""
    groups = [dist.new_group(list(range(size))) for _ in pipelines]
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        results[number] = _steps(rank, size, number, groups[number], pipelines[number])

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(pipelines))]
    for thread in threads if rank % 2 == 0 else reversed(threads):
        thread.start()
        time.sleep(APART)
    for thread in threads:
        thread.join(40.0)
    close_communicators()
    return [results[number] for number in range(len(pipelines))]


def in_turn(rank: int, size: int, pipelines: list[Pipeline]) -> list[list[ToyResult]]:
    """One after the other, as a policy and a reward model; twice, so that each is come back to."""
    groups = [dist.new_group(list(range(size))) for _ in pipelines]
    results: list[list[ToyResult]] = []
    for _ in range(2):
        results = [_steps(rank, size, n, groups[n], pipeline) for n, pipeline in enumerate(pipelines)]
    close_communicators()
    return results


@pytest.mark.parametrize(
    ("size", "pipelines", "main"),
    [(2, SAME, in_threads), (4, DIFFERENT, in_threads), (2, DIFFERENT, in_turn)],
    ids=["same-2", "different-4", "in_turn-2"],
)
def test_numbers_are_those_of_one_process(size: int, pipelines: list[Pipeline], main: Callable[..., Any]) -> None:
    per_rank = run_processes(main, size, (pipelines,), timeout=60.0, start_method="forkserver")
    for number, (chunks, microbatches, _) in enumerate(pipelines):
        for step in range(STEPS):
            expected = reference_run(size * chunks, data_of(number, step, microbatches))
            got = merged([results[number][step] for results in per_rank])
            assert got.difference(expected) == 0.0, (number, step)


def names(rank: int, size: int) -> tuple[str, str, str]:
    """Of two groups over the same ranks; and the first one's when torch has another name for it on each rank, as
    ``split_group`` leaves it."""
    cpu = torch.device("cpu")
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    first, second = (pipeline_name(group, "gloo", cpu) for group in groups)
    groups[0]._set_group_name(f"hash of what rank {rank} is in")
    return first, second, pipeline_name(groups[0], "nccl", cpu)


def test_a_group_has_one_name() -> None:
    first, second = run_processes(names, 2, timeout=60.0, start_method="forkserver")
    assert first == second
    assert first == ("0-1 in group 1", "0-1 in group 2", "0-1 in group hash of what rank 0 is in")
