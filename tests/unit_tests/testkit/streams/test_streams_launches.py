"""Kernels are launched within compute instructions alone: one that waits for its device waits there, where ``verify``
has proven that it may, and not behind the receives of a boundary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from megatron_pp.features.modules.modules_runner import ModulesRunner
from megatron_pp.integrations.torch_pipelining import get_schedule_class
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import BATCHED, PLAIN, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.threads import run_ranks
from testkit.device_runs.stream_runs import plan_on_streams
from testkit.streams import CallLog, StreamNetwork, virtual_cuda
from testkit.thread_runs import output_layer_runs
from testkit.thread_runs.output_layer_runs import Case
from testkit.thread_runs.race_support import ExactBlock, ExactCausalBlock, ExactSkipBlock
from testkit.virtual_groups import process_group, virtual_distributed
from tests.unit_tests.features.modules import test_modules_steps

OVERLAP = PlanSpec("interleaved_1f1b", 2, 2, 4)
SPECS = {
    "1f1b": PlanSpec("1f1b", 3, 1, 4),
    "gis_h": PlanSpec("gis_h", 2, 2, 4),
    "overlap": OVERLAP,
    "batched": replace(OVERLAP, policy=BATCHED),
    "plain": replace(OVERLAP, policy=PLAIN),
    "pairs": PlanSpec("dualpipe_v", 2, 2, 8, overlap_pairs=True),
    "slices": PlanSpec("seq_1f1b", 2, 1, 4, slices=2),
    "offload": replace(OVERLAP, offload_chunks=2),
    "variable": replace(OVERLAP, variable_shapes=True),
    "evaluation": replace(OVERLAP, forward_only=True),
}
_OPERATION = re.compile("[A-Z_]+")
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty"}
# Copies between host and device, which no module is loaded for: of offloads, and of shapes that are sent ahead.
_COPIES = {(op, "copy_") for op in (ins.SEND_F, ins.SEND_B, "OFFLOAD", "LOAD")}
_COPIES |= {(op, "lift_fresh") for op in (ins.SEND_F, ins.SEND_B)}


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous."""
    return torch.stack((tensor, tensor), -1)[..., 0]


class StridedBlock(ExactBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return strided(super().forward(x))


class StridedCausalBlock(ExactCausalBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return strided(super().forward(x))


class StridedSkipBlock(ExactSkipBlock):
    """What it makes for later stages, too."""

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        output = super().forward(x, **named)
        if not isinstance(output, tuple):
            return strided(output)
        return strided(output[0]), {name: strided(tensor) for name, tensor in output[1].items()}


class StridedGradients(PlanExecutor):
    """Backwards give input gradients that are not contiguous, as steps of a host may."""

    def call_backward(self, at: Task, *given: Any) -> Any:
        grad = super().call_backward(at, *given)
        return None if grad is None else strided(grad)


class Logged(CallLog):
    def launched(self) -> Iterator[tuple[str, str, str]]:
        """The instruction's operation, the instruction, and the name of each operation that was launched in it."""
        rank_of: dict[int, int] = {}
        ranges: dict[int, list[str]] = {}
        for record in self.records:
            if record["do"] == "stream" and not record["host"]:
                rank_of[record["stream"]] = record["rank"]
            elif record["do"] == "begin":
                ranges.setdefault(record["rank"], []).append(record["name"])
            elif record["do"] == "end":
                ranges[record["rank"]].pop()
            elif record["do"] == "launch" and record["stream"] in rank_of:
                within = ranges.get(rank_of[record["stream"]])
                found = _OPERATION.search(within[-1]) if within else None
                if within and found:
                    yield found[0], within[-1], record["what"]

    def elsewhere(self) -> set[tuple[str, str]]:
        """Operation of the instruction and name of what is launched outside of compute."""
        found = {(op, what) for op, _, what in self.launched() if op not in ins.COMPUTE_OPS and what not in _ALLOCATES}
        return found - _COPIES


def log_of(spec: PlanSpec, block: Callable[[int], torch.nn.Module], executor: type[PlanExecutor]) -> Logged:
    log = Logged()
    report = plan_on_streams(spec, executor, log=log, block=block)
    assert not report.races, str(report)
    assert sum(op in ins.COMPUTE_OPS for op, *_ in log.launched()) > 50
    return log


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_tensors_that_are_not_contiguous_are_copied_in_the_operation_that_makes_them(spec: PlanSpec) -> None:
    """Before any receive of the boundary is posted: receives stand behind the operation."""
    log = log_of(spec, StridedBlock if spec.num_parts == 1 else StridedCausalBlock, StridedGradients)
    assert log.elsewhere() == set()


def test_named_tensors_are_copied_in_the_forward_that_makes_them() -> None:
    spec = PlanSpec("interleaved_1f1b", 2, 2, 4, skip_tensors="blocks")
    log = log_of(spec, lambda stage: StridedSkipBlock(stage, spec.skip_tensors), StridedGradients)
    assert log.elsewhere() == {(ins.WAIT_B, "add_")}, "a gradient that has come is added to the rank's sum"


def test_the_broadcast_input_of_a_split_output_layer_is_copied_in_the_forward() -> None:
    class StridedStage(output_layer_runs.Stage):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return strided(super().forward(x))

    log = Logged()
    report, *_ = output_layer_runs.step_on_nccl(
        Case("vocab_1f1b", 2, 4), log, block=StridedStage, overlap_p2p_comm=True
    )
    assert not report.races, str(report)
    assert {one for one in log.elsewhere() if one[0] == "BROADCAST"} == set()


def test_several_modules_copy_what_they_send_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ModulesRunner._output_of
    monkeypatch.setattr(ModulesRunner, "_output_of", lambda *given: strided(whole(*given)))
    setup, log = test_modules_steps.JOINED["fan-in"], Logged()
    network = StreamNetwork(test_modules_steps.size_of(setup), log=log)
    with virtual_cuda():
        test_modules_steps.run(setup, network)
    assert sum(op in ins.COMPUTE_OPS for op, *_ in log.launched()) > 50
    assert log.elsewhere() == set()


class BothWays(torch.nn.Module):
    """A stage of torch's whose output and input gradient are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.t()).tanh().t()


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("InterleavedZeroBubble", 2)])
def test_stages_of_torch_copy_what_they_send_in_the_operation_that_makes_it(schedule: str, chunks: int) -> None:
    """A backward that is split by autograd's graph gives gradients as they come."""
    log = Logged()
    network, store = StreamNetwork(2, seed=None, log=log), dist.HashStore()

    def main(rank: int) -> None:
        with network.running(rank), process_group(network, rank, store) as group:
            place, numbers = network.devices[rank].place, range(rank, 2 * chunks, 2)
            stages = [PipelineStage(BothWays(), number, 2 * chunks, place, group=group) for number in numbers]
            kind: Any = get_schedule_class(schedule)
            steps = kind(stages if chunks > 1 else stages[0], 4, loss_fn=torch.nn.functional.mse_loss)
            given = {"target": torch.zeros(16, 4)} if rank == 1 else {}
            steps.step(*([torch.ones(16, 4)] if rank == 0 else []), **given)

    with virtual_cuda(), virtual_distributed():
        run_ranks(2, main, network.abort, 30.0)
    assert sum(op in ins.COMPUTE_OPS for op, *_ in log.launched()) > 50
    assert log.elsewhere() == set()
