"""Pairs as Megatron's schedule plans run them on a device: outputs are made, and sent, on the stream of all-to-alls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_pp.features.pairs.joint_steps import BackwardHalf, ForwardHalf, Ready
from megatron_pp.integrations.combined import CombinedSteps
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.executor import PlanExecutor
from tests.harness.stream_runs import plan_on_streams

SPEC = PlanSpec("combined_1f1b", 3, 1, 8, overlap_pairs=True)


def deallocate(tensor: torch.Tensor, wanted: bool) -> None:
    tensor.data = torch.empty((1,), device=tensor.device, dtype=tensor.dtype)


class Steps:
    """Of the toy model, with a second stream as in a schedule plan."""

    schedules = SimpleNamespace(deallocate_output_tensor=deallocate)

    def __init__(self, steps: Any) -> None:
        self.steps = steps
        self.side = torch.cuda.Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def forward_and_backward(
        self, forward: ForwardHalf, backward: BackwardHalf, on_output: Ready, on_input_grad: Ready
    ) -> Any:
        current = torch.cuda.current_stream()
        with torch.cuda.stream(self.side):  # an all-to-all that does not wait for what the other stream has waited for
            torch.ones_like(forward.input_tensor if forward.input_tensor is not None else backward.output_grad)
        layers = self.steps.forward(*forward)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            output = layers * 1.0
            if self.steps.options.is_last_stage[
                forward.chunk
            ]:  # it is not sent; its backward reads it, as do Megatron's
                output.record_stream(current)
            layers.record_stream(self.side)  # as Megatron's nodes do with what came from the other stream
            on_output(output)
        grad = self.steps.backward(*backward)
        on_input_grad(grad)
        current.wait_stream(self.side)
        return output, grad

    def backward_root(self, output: Any) -> Any:
        return CombinedSteps.backward_root(self, output)  # type: ignore[arg-type]


class Unrecorded(Steps):
    def backward_root(self, output: Any) -> Any:
        deallocate(output, True)
        return output


def executor_with(kind: type[Steps]) -> type[PlanExecutor]:
    class Executor(PlanExecutor):
        def __post_init__(self) -> None:
            self.steps = kind(self.steps)
            super().__post_init__()

    return Executor


def test_outputs_of_the_other_stream_are_not_reused_before_they_are_sent() -> None:
    report = plan_on_streams(SPEC, executor_with(Steps))
    assert not report.races, str(report)
    assert report.reused > 0


def test_without_recording_the_stream_they_would_be() -> None:
    assert plan_on_streams(SPEC, executor_with(Unrecorded)).races
