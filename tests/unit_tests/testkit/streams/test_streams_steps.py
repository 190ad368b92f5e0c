"""Steps on virtual devices: pairs, a user's own streams, the transport for NCCL with its channels, guard and tracing.
No stream race, and the numbers of one process.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.errors import PipelineError
from megatron_pp.features.pairs.pair_runner import BackwardHalf, ForwardHalf, HalfCall, Ready, on_two_streams
from megatron_pp.integrations.megatron.steps.combined import CombinedSteps
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PLAIN, PlanSpec
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.toy import ToyBlock, ToyData, current_slice, reference_run, toy_chunks, toy_config, toy_loss
from megatron_pp.weight_grad import split_weight_grad
from testkit.device_runs.nccl_runs import FailingBlock, step_on_nccl
from testkit.device_runs.stream_runs import POLICIES, plan_on_streams, toy_step_on_streams
from testkit.streams import check_streams

OVERLAP = POLICIES["overlap"]


# -- a user's own forward_step, and streams of its own -----------------------------------------------------------------


def report_of(forward_step: Any, **fields: Any) -> Any:
    """A step of the toy model with ``forward_step``, on two ranks."""
    config = toy_config(**OVERLAP, **fields)
    data = ToyData(4)

    def rank_main(communicator: P2PCommunicator) -> None:
        chunks = toy_chunks(Placement("loop", 2, 1), communicator.rank, config)
        toy_step(chunks, data, communicator, forward_step_func=forward_step)

    return check_streams(rank_main, 2, config)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe_v"])
def test_training_steps_one_after_the_other(schedule: str) -> None:
    """Memory of one step is reused in the next; parameters change in between."""
    fields = {"pipeline_schedule": schedule, "virtual_pipeline_model_parallel_size": 2, **OVERLAP}
    config = toy_config(overlapped_forward_backward=on_two_streams, **fields)

    def rank_main(communicator: P2PCommunicator) -> list[float]:
        chunks = toy_chunks(placement_of(config, 2, 2), communicator.rank, config)
        split_weight_grad(chunks)
        optimizer = torch.optim.Adam([p for chunk in chunks for p in chunk.parameters()])
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            losses += [float(r["loss"]) for r in toy_step(chunks, ToyData(4, first=4 * step), communicator)]
            optimizer.step()
        return losses

    report = check_streams(rank_main, 2, config)
    assert not report.races, str(report)
    assert sum(map(len, report.results)) == 12


class OnASideStream:
    """A forward step that adds one to its output on a stream of its own. ``edges``: those that are there."""

    def __init__(self, *edges: str) -> None:
        self.edges = edges

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        x, target = next(data_iterator)
        output = model(x)
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        if "in" in self.edges:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            output = output + 1
        if "out" in self.edges:
            current.wait_event(side.record_event())
        return output, lambda out: toy_loss(target, out)


def test_a_forward_step_with_a_side_stream() -> None:
    report = report_of(OnASideStream("in", "out"))
    assert not report.races, str(report)


@pytest.mark.parametrize(("edge", "kind"), [("in", "write/read"), ("out", "write/read")])
def test_a_missing_edge_of_a_side_stream_is_a_race(edge: str, kind: str) -> None:
    report = report_of(OnASideStream(edge))
    found = {(race.kind, race.second.instruction.split(".")[0]) for race in report.races}
    assert any(one == kind for one, _ in found), str(report)


class PairWithout:
    """``on_two_streams`` without one of its edges."""

    def __init__(self, missing: str) -> None:
        self.missing = missing

    def __call__(self, forward_call: HalfCall, backward_call: HalfCall) -> None:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        if self.missing != "before":
            side.wait_stream(current)
        with torch.cuda.stream(side):
            forward_call()
        backward_call()
        if self.missing != "after":
            current.wait_stream(side)


@pytest.mark.parametrize("missing", ["", "before", "after"])
def test_pairs_need_both_edges(missing: str) -> None:
    report, _ = toy_step_on_streams(
        "dualpipe_v", 2, ToyData(6), overlapped_forward_backward=PairWithout(missing), **OVERLAP
    )
    assert bool(report.races) == bool(missing), str(report)


def counting_tokens(data_iterator: Any, model: Any) -> Any:
    x, target = next(data_iterator)
    if (part := current_slice()) is not None:
        x, target = part.of(x, 0), part.of(target, 0)
    return model(x), lambda output: (toy_loss(target, output)[0], torch.full((), 6, dtype=torch.int), {})


@pytest.mark.parametrize("calculate_per_token_loss", [True, False])
@pytest.mark.parametrize("slices", [1, 3])
def test_pairs_on_two_streams_count_tokens(calculate_per_token_loss: bool, slices: int) -> None:
    """Forwards of one rank are on two streams in turn, and both read the sum so far."""
    schedule = "combined_1f1b" if slices == 1 else "seq_1f1b"
    fields = {"overlapped_forward_backward": on_two_streams, "calculate_per_token_loss": calculate_per_token_loss}
    report = report_of(counting_tokens, pipeline_schedule=schedule, sequence_slices=slices, **fields)
    assert not report.races, str(report)


class SynchronizingBlock(ToyBlock):
    """A stage with a device synchronisation, as Megatron's timers of level 2 have one around each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return super().forward(x)


def test_a_device_synchronisation_with_receives_posted_ahead_hangs_and_is_named() -> None:
    with pytest.raises((RuntimeError, PipelineError), match=r"the device of rank \d hangs at"):
        toy_step_on_streams("interleaved_1f1b", 2, ToyData(4), block=SynchronizingBlock, device_sync=False, **OVERLAP)
    toy_step_on_streams("interleaved_1f1b", 2, ToyData(4), block=SynchronizingBlock, **OVERLAP)


@pytest.fixture(autouse=True)
def nccl_settings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    caplog.set_level(logging.WARNING, logger="megatron_pp")


@pytest.mark.parametrize(
    "fields",
    [
        *POLICIES.values(),
        {"p2p_channels": "shared"},
        {"overlap_p2p_comm": True, "p2p_debug": True},
        {"overlap_p2p_comm": True, "pipeline_schedule": "dualpipe_v", "overlapped_forward_backward": on_two_streams},
    ],
    ids=[*POLICIES, "shared channels", "debug mode", "pairs on two streams"],
)
def test_steps_on_streams_have_no_races_and_the_numbers_of_one_process(fields: dict[str, Any]) -> None:
    data = ToyData(4)
    report, result = step_on_nccl(2, 2, data, **fields)
    assert not report.races, str(report)
    assert result.difference(reference_run(4, data)) == 0.0


def test_variable_shapes_on_three_ranks() -> None:
    data = ToyData(4, variable=True)
    report, result = step_on_nccl(3, 1, data, overlap_p2p_comm=True)
    assert not report.races, str(report)
    assert result.difference(reference_run(3, data)) == 0.0


def test_tracing_with_events(tmp_path: Path) -> None:
    report, _ = step_on_nccl(2, 1, ToyData(4), overlap_p2p_comm=True, trace_dir=str(tmp_path), trace_steps="1")
    assert not report.races, str(report)
    assert len(list(tmp_path.glob("trace-*.jsonl"))) == 2


def test_a_failure_reaches_the_rank_whose_device_waits() -> None:
    """The guard aborts communicators: the device of rank 0 goes on, and the guard has the last word."""
    errors: dict[int, str] = {}
    step_on_nccl(2, 1, ToyData(4), overlap_p2p_comm=True, block=FailingBlock, errors=errors)
    assert errors[1] == "ValueError: this stage fails"
    assert errors[0].startswith("PipelinePeerError")
    assert "this stage fails" in errors[0]


SPEC = PlanSpec("combined_1f1b", 3, 1, 12, overlap_pairs=True, policy=PLAIN)


def deallocate(tensor: torch.Tensor, wanted: bool) -> None:
    tensor.data = torch.empty((1,), device=tensor.device, dtype=tensor.dtype)


class Steps:
    """Steps of the toy model, with a second stream as in a schedule plan."""

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
    races = plan_on_streams(SPEC, executor_with(Unrecorded)).races
    assert {(race.first.what.split()[0], race.kind) for race in races} == {("send", "read/reuse")}
