"""Pairs that the model runs in one call: results are sent before the pair is over; the numbers stay one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pp.features.pairs.pair_instructions import PAIR
from megatron_pp.features.pairs.pair_runner import BackwardHalf, ForwardHalf, Ready
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.adversarial_transports import HOSTILE_NETWORKS
from megatron_pp.testing.toy import reference_run
from testkit.thread_runs.race_support import ExactBlock, exact_data, network_for, run_plan

MICROBATCHES = 8


class JointSteps:
    """Runs a pair as schedule plans do: both results are given out, then the loss and weight gradients follow."""

    def __init__(self, steps: Any, is_last_stage: Any) -> None:
        self.steps = steps
        self.is_last_stage = is_last_stage
        self.pairs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def forward_and_backward(
        self, forward: ForwardHalf, backward: BackwardHalf, on_output: Ready, on_input_grad: Ready
    ) -> Any:
        self.pairs += 1
        output = self.steps.forward(*forward)
        on_output(torch.empty(0) if self.is_last_stage(forward.chunk) else output)
        grad = self.steps.backward(*backward)
        on_input_grad(grad)
        return output, grad


class Executor(PlanExecutor):
    """Runs pairs jointly; notes what observers see."""

    def __post_init__(self) -> None:
        is_last = lambda chunk: self.plan.placement.is_last_stage(self.communicator.rank, chunk)  # noqa: E731
        self.steps = JointSteps(self.steps, is_last)
        self.observer = self
        self.begun: list[str] = []
        self.ended: list[str] = []
        super().__post_init__()

    def begin(self, at: Any) -> None:
        self.begun.append(str(at))

    def end(self, at: Any) -> None:
        self.ended.append(str(at))

    def run(self) -> None:
        steps = self.steps
        super().run()
        assert self.steps is steps
        expected = [str(at) for at in self.plan.timed(self.rank)]
        assert self.begun == self.ended == expected, "one begin and end for each instruction, in the recorded order"
        assert steps.pairs == sum(at.op == PAIR for at in self.program)


def combined(schedule: str = "combined_1f1b", chunks: int = 2, **fields: Any) -> Plan:
    return build_plan(PlanSpec(schedule, 2, chunks, MICROBATCHES, overlap_pairs=True, **fields))


@pytest.mark.parametrize("kind", HOSTILE_NETWORKS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "plan",
    [combined(), combined(chunks=1), combined("dualpipe_v"), combined(policy="batched")],
    ids=["virtual stages", "one chunk", "dualpipe_v", "batched"],
)
def test_joint_pairs_give_the_numbers_of_one_process(plan: Plan, kind: Any) -> None:
    data = exact_data(MICROBATCHES)
    network = network_for(plan, kind, seed=1, pollable=True)
    outcome = run_plan(plan, data, network, executor=Executor)
    assert outcome.result.difference(reference_run(plan.placement.num_stages, data, block=ExactBlock)) == 0.0
    assert not outcome.complaints + network.violations
    sent = sum(at.op == PAIR and len(at.members) > 2 for program in plan.programs for at in program)
    assert bool(sent) == (plan.spec.policy == "overlap")


def test_a_send_is_posted_before_its_pair_is_over() -> None:
    plan = combined()
    order: list[str] = []

    class Watched(Executor):
        def _send_f(self, at: Any) -> None:
            order.append(f"{self.rank} {self.instruction} in {self.program[self.position].op}")
            super()._send_f(at)

    run_plan(plan, exact_data(MICROBATCHES), network_for(plan, HOSTILE_NETWORKS[0], seed=1), executor=Watched)
    within = [
        f"{rank} {at} in PAIR"
        for rank, program in enumerate(plan.programs)
        for entry in program
        if entry.op == PAIR
        for at in entry.members
        if at.op == "SEND_F"
    ]
    assert within
    assert set(within) == {line for line in order if "PAIR" in line}
