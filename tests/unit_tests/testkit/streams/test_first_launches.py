"""A kernel's first launch waits until its device is idle, and so for receives that were posted ahead (on a GPU:
``scripts/gpu_check.sh --only waits first_steps``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pp.errors import PipelineError, PipelineStallError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.ir.spec import ON_NCCL, ONE_QUEUE, PlanSpec
from megatron_pp.runtime.engine import executor
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import TOY_SCHEDULES, ToyBlock, ToyData, ToyResult, merged, reference_run
from testkit.device_runs.nccl_runs import on_nccl
from testkit.device_runs.stream_runs import POLICIES, on_one_device, plan_on_streams, toy_step_on_streams
from testkit.inputs.plan_text import save_plan, small_plan, with_programs
from testkit.mutants.device_mutants import PostsFirstGradientAtOnce
from testkit.streams import LATER_STEPS, DeviceRules, StreamNetwork, StreamReport
from testkit.streams.device import current_device
from tests.unit_tests.testkit.streams.test_streams_launches import StridedBlock

RANKS, CHUNKS, DATA = 2, 2, ToyData(4)
HANGS = r"the device of rank . hangs at"
FAMILIES = [name for name, family in TOY_SCHEDULES.items() if family.search is None]


# -- which launches are first ones -------------------------------------------------------------------------------------


def test_the_first_launch_of_each_kernel_loads_it() -> None:
    """Allocations, copies of a block as it is, views and what the host does launch none. A product of another size is
    another kernel."""
    loaded: list[str] = []

    def look(*expected: str) -> None:
        device = current_device()
        assert device is not None
        names = sorted(kernel.operation for kernel in device.kernels)
        loaded.extend(names)
        assert names == sorted(expected), "so far"

    def program() -> None:
        x = torch.empty(4, 4)
        x.view(-1).detach().to("cpu").add_(1)
        y = x.clone()
        y.copy_(x.cpu())
        look()
        x.fill_(1.0)
        x[:2].fill_(2.0)
        torch.ones(3)
        look("fill")
        x.t().contiguous()
        look("fill", "copy")
        x @ x
        x @ x
        x.add(x).add_(x)
        look("fill", "copy", "mm", "add")
        x[:2] @ x
        x.to(torch.bfloat16)
        look("fill", "copy", "mm", "add", "mm", "copy")

    on_one_device(program)
    assert loaded


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", FAMILIES)
def test_no_first_step_hangs(schedule: str) -> None:
    report, difference = toy_step_on_streams(schedule, RANKS, DATA, **POLICIES["overlap"])
    assert not report.races, str(report)
    assert difference == 0.0


# As megatron_pp made it until a GPU hung in its first step.
GIS_H = (
    "RECV_F1.0 F0.0 SEND_F0.0 WAIT_F1.0 F1.0 RECV_B1.0 SEND_F1.0 FREE_F0.0 F0.1 RECV_F1.1 SEND_F0.1 FREE_F1.0 "
    "WAIT_B1.0 B1.0 RECV_B0.0 SEND_B1.0 WAIT_F1.1 F1.1 SEND_F1.1 FREE_F0.1 FREE_B1.0 WAIT_B0.0 B0.0 RECV_B1.1 "
    "FREE_F1.1 F0.2 RECV_F1.2 SEND_F0.2 WAIT_B1.1 B1.1 RECV_B0.1 SEND_B1.1 FREE_F0.2 WAIT_F1.2 F1.2 SEND_F1.2 "
    "FREE_B1.1 WAIT_B0.1 B0.1 RECV_B1.2 FREE_F1.2 F0.3 RECV_F1.3 SEND_F0.3 WAIT_B1.2 B1.2 RECV_B0.2 SEND_B1.2 "
    "FREE_F0.3 WAIT_F1.3 F1.3 SEND_F1.3 FREE_B1.2 WAIT_B0.2 RECV_B1.3 B0.2 FREE_F1.3 WAIT_B1.3 RECV_B0.3 "
    "ENABLE_GRAD_SYNC1 B1.3 SEND_B1.3 WAIT_B0.3 ENABLE_GRAD_SYNC0 B0.3 FREE_B1.3",
    "RECV_F0.0 WAIT_F0.0 RECV_F1.0 F0.0 SEND_F0.0 WAIT_F1.0 F1.0 RECV_F0.1 FREE_F0.0 B1.0 RECV_B0.0 SEND_B1.0 "
    "WAIT_F0.1 F0.1 RECV_F1.1 SEND_F0.1 FREE_B1.0 WAIT_B0.0 B0.0 SEND_B0.0 FREE_F0.1 WAIT_F1.1 F1.1 RECV_F0.2 "
    "FREE_B0.0 B1.1 RECV_B0.1 SEND_B1.1 WAIT_F0.2 F0.2 RECV_F1.2 SEND_F0.2 FREE_B1.1 WAIT_B0.1 B0.1 SEND_B0.1 "
    "FREE_F0.2 WAIT_F1.2 F1.2 RECV_F0.3 FREE_B0.1 B1.2 RECV_B0.2 SEND_B1.2 WAIT_F0.3 F0.3 RECV_F1.3 SEND_F0.3 "
    "FREE_B1.2 WAIT_B0.2 B0.2 SEND_B0.2 FREE_F0.3 WAIT_F1.3 F1.3 RECV_B0.3 FREE_B0.2 ENABLE_GRAD_SYNC1 B1.3 SEND_B1.3 "
    "WAIT_B0.3 ENABLE_GRAD_SYNC0 B0.3 SEND_B0.3 FREE_B1.3 FREE_B0.3",
)


def test_the_plan_that_hung_on_a_gpu_hangs_in_its_first_step_alone(tmp_path: Path) -> None:
    path = tmp_path / "gis_h.json"
    save_plan(with_programs(small_plan("gis_h", RANKS, CHUNKS, 4), *GIS_H), path)
    fields: dict[str, Any] = {"device_sync": False, **POLICIES["overlap"]}
    report, difference = toy_step_on_streams(str(path), RANKS, DATA, rules=LATER_STEPS, **fields)
    assert not report.races, str(report)
    assert difference == 0.0
    with pytest.raises((RuntimeError, PipelineError), match=HANGS):
        toy_step_on_streams(str(path), RANKS, DATA, **fields)


def test_a_receive_posted_before_the_first_forward_hangs_there_alone() -> None:
    spec = PlanSpec("1f1b", 3, 1, 4, device=ON_NCCL)
    for rules in (LATER_STEPS, DeviceRules(first_launches=False, memory=1 << 20)):
        assert not plan_on_streams(spec, PostsFirstGradientAtOnce, rules=rules).races
    with pytest.raises((RuntimeError, PipelineError), match=HANGS):
        plan_on_streams(spec, PostsFirstGradientAtOnce)


def test_a_copy_at_the_send_hangs_behind_receives_of_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copied output is not contiguous."""
    spec = PlanSpec("gis_h", RANKS, CHUNKS, 4, device=(ONE_QUEUE,))
    assert not plan_on_streams(spec, block=StridedBlock).races
    monkeypatch.setattr(executor, "in_one_block", lambda tensor: tensor)
    assert not plan_on_streams(spec, block=StridedBlock, rules=LATER_STEPS).races
    with pytest.raises((RuntimeError, PipelineError), match=HANGS):
        plan_on_streams(spec, block=StridedBlock)


# -- launches that wait in any step ------------------------------------------------------------------------------------


class Launching(ToyBlock):
    """Forwards and backwards of ``ranks`` wait for the device, in every step."""

    ranks: tuple[int, ...] = ()

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.rank = stage % RANKS

    def launch(self, *of_backward: Any) -> None:
        if self.rank in self.ranks:
            torch.cuda.synchronize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.launch()
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.launch)
        return output


def steps(schedule: str, ranks: tuple[int, ...], **fields: Any) -> tuple[StreamReport, ToyResult]:
    """Two steps, of which kernels were loaded before; the result of the last."""
    network = StreamNetwork(RANKS, seed=None, rules=LATER_STEPS)
    block = type("Launching", (Launching,), {"ranks": ranks})

    def body(communicator: P2PCommunicator) -> ToyResult:
        given = communicator.rank, RANKS, CHUNKS, DATA, communicator.config, communicator
        run_rank(*given, block=block)
        return run_rank(*given, block=block)

    fields |= {"pipeline_schedule": schedule, "virtual_pipeline_model_parallel_size": CHUNKS, "overlap_p2p_comm": True}
    results = on_nccl(network, body, **fields)
    return StreamReport.of(network, results), merged(results)


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "gis_h", "interleaved_zb", "breadth_first"])
def test_launches_that_wait_in_any_step_end(schedule: str, ranks: tuple[int, ...]) -> None:
    report, result = steps(schedule, ranks, p2p_timeout=10.0)
    assert not report.races, str(report)
    assert result.difference(reference_run(RANKS * CHUNKS, DATA)) == 0.0


@pytest.mark.slow
def test_launches_that_wait_behind_receives_posted_ahead_hang_and_are_named() -> None:
    """Both ranks launch what is not loaded, each with a receive posted that waits for what the other launches."""
    with pytest.raises(PipelineStallError, match=r"wait for each other's messages: .* Set config\.device_sync"):
        steps("interleaved_1f1b", (0, 1), device_sync=False, p2p_timeout=1.5, compute_timeout=60.0)
