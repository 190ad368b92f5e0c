"""A kernel's first launch waits until its device is idle, and so for receives that were posted ahead (on a GPU:
``scripts/gpu_check.sh --only waits first_steps``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pp.errors import PipelineStallError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, merged, reference_run
from tests.harness.nccl_runs import on_nccl
from tests.harness.streams import StreamNetwork, StreamReport

RANKS, CHUNKS, DATA = 2, 2, ToyData(4)


class Kernels:
    """Which launches wait for their device: all of the first ``first`` steps, and on ``ranks`` all of every step."""

    def __init__(self, first: int = 0, ranks: tuple[int, ...] = ()) -> None:
        self.first, self.ranks = first, ranks
        self.done = [0] * RANKS  # steps of each rank

    def launch(self, rank: int) -> None:
        if self.done[rank] < self.first or rank in self.ranks:
            torch.cuda.synchronize()

    def block(self, stage: int) -> torch.nn.Module:
        return Launching(stage, self)


class Launching(ToyBlock):
    def __init__(self, stage: int, kernels: Kernels) -> None:
        super().__init__(stage)
        self.rank, self.kernels = stage % RANKS, kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kernels.launch(self.rank)
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.kernels.launch(self.rank))
        return output


def steps(schedule: str, kernels: Kernels, count: int = 2, **fields: Any) -> tuple[StreamReport, ToyResult]:
    """``count`` steps; the result of the last."""
    network = StreamNetwork(RANKS, seed=None)

    def body(communicator: P2PCommunicator) -> ToyResult:
        config, given = communicator.config, (communicator.rank, RANKS, CHUNKS, DATA)
        found, communicator.transport.kinds_run = ToyResult(), frozenset()
        for _ in range(count):
            found = run_rank(*given, config, communicator, block=kernels.block)
            kernels.done[communicator.rank] += 1
        return found

    fields |= {"pipeline_schedule": schedule, "virtual_pipeline_model_parallel_size": CHUNKS, "overlap_p2p_comm": True}
    results = on_nccl(network, body, **fields)
    return StreamReport.of(network, results), merged(results)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "gis_h", "interleaved_zb"])
def test_steps_whose_kernels_are_loaded_by_the_first(schedule: str) -> None:
    report, result = steps(schedule, Kernels(first=1))
    assert not report.races, str(report)
    assert result.difference(reference_run(RANKS * CHUNKS, DATA)) == 0.0


def test_launches_that_wait_behind_receives_posted_ahead_hang_and_are_named() -> None:
    """Both ranks launch what is not loaded, each with a receive posted that waits for what the other launches."""
    with pytest.raises(PipelineStallError, match=r"wait for each other's messages: .* Set config\.device_sync"):
        steps("interleaved_1f1b", Kernels(ranks=(0, 1)), device_sync=False, p2p_timeout=1.5, compute_timeout=60.0)


@pytest.mark.parametrize("schedule", ["gis_h", "breadth_first"])
def test_launches_of_one_rank_that_wait_in_any_step_end(schedule: str) -> None:
    """A receive is not posted ahead of what its message comes from."""
    report, result = steps(
        schedule, Kernels(ranks=(0,)), count=1, device_sync=False, p2p_timeout=5.0, compute_timeout=5.0
    )
    assert not report.races, str(report)
    assert result.difference(reference_run(RANKS * CHUNKS, DATA)) == 0.0
