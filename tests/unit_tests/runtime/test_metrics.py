"""How long a rank computed and waited, told while the run goes on (``config.metrics``)."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_pp.features.measuring.metrics import Meter, StepMetrics, _OnDevice, metrics_of
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import COMPUTE_OPS, each, placed
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.toy import ToyBlock, ToyData
from megatron_pp.tools.cli import main
from megatron_pp.tracing.run import load_run
from megatron_pp.weight_grad import split_weight_grad
from testkit.device_runs.nccl_runs import step_on_nccl
from testkit.streams.torch_calls import cuda
from testkit.thread_runs.step_runs import pipeline

PROGRAM = tuple(placed(op, 0, 0, -1, 0) for op in ("WAIT_F", "F", "SEND_F", "FREE_F"))


class SlowBlock(ToyBlock):
    """A block that is slow on the last stage, so that the first rank waits for it."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stage == 1:
            time.sleep(0.01)
        return super().forward(x)


def train(steps: int, folder: Any = None, **fields: Any) -> dict[int, dict[int, StepMetrics]]:
    """By rank and step, what two ranks were told."""
    told: dict[int, dict[int, StepMetrics]] = defaultdict(dict)

    def fields_of(rank: int) -> dict[str, Any]:
        return {"metrics": told[rank].__setitem__, "trace_dir": folder}

    def rank_main(rank: Any) -> None:
        chunks = rank.model(SlowBlock)
        for _ in range(steps):
            rank.step(chunks)
        rank.step(chunks, forward_only=True)

    pipeline(2, 1, 4, rank_main, fields_of=fields_of, **fields)
    return told


def test_metrics_are_reported_for_every_training_step_and_no_evaluation() -> None:
    told = train(3)
    assert {rank: sorted(steps) for rank, steps in told.items()} == {0: [1, 2, 3], 1: [1, 2, 3]}
    for numbers in (*told[0].values(), *told[1].values()):
        assert 0 < numbers.compute < numbers.pipeline
        assert 0 < numbers.bubble < 1
    assert told[0][3].exposed_wait > 0.02, "for the slow rank"
    assert told[1][3].compute > 0.04


@pytest.mark.parametrize(
    ("chunks", "fields"),
    [
        (1, {"pipeline_schedule": "zb_h1"}),
        (2, {"batch_p2p_comm": True}),
        (2, {"pipeline_schedule": "pipe_offload", "overlap_p2p_comm": True}),
        (2, {"pipeline_schedule": "dualpipe_v", "overlapped_forward_backward": in_turn}),
    ],
)
def test_instructions_of_all_kinds_are_timed(chunks: int, fields: dict[str, Any]) -> None:
    told: list[int] = []

    def take(step: int, numbers: StepMetrics) -> None:
        assert 0 < numbers.compute < numbers.pipeline
        told.append(step)

    def rank_main(rank: Any) -> None:
        made = rank.model(ToyBlock)
        split_weight_grad(made)
        for _ in range(2):
            rank.step(made)

    pipeline(2, chunks, 4, rank_main, metrics=take, **fields)
    assert sorted(told) == [1, 1, 2, 2]


def test_the_program_numbers_its_steps() -> None:
    assert sorted(train(2, step_number=9)[0]) == [9]


def test_metrics_are_within_the_times_of_a_trace(tmp_path: Any) -> None:
    """The trace begins before the metrics and ends after them."""
    told, run = train(3, str(tmp_path)), load_run(tmp_path)
    assert run.steps == (2, 3)
    for step in run.steps:
        for rank, trace in enumerate(run.ranks):
            recorded = trace.steps[step]
            starts, ends = ([1e-9 * time for time in times] for times in (recorded.starts, recorded.ends))
            around = metrics_of(run.plan(step).timed(rank), starts, ends)
            for inner, outer in zip(told[rank][step], around, strict=True):
                assert 0 < inner <= outer + 1e-6


def test_a_trace_for_perfetto_has_the_names_of_the_plans_instructions(tmp_path: Any) -> None:
    """Ranges of profilers have the same names (tests/unit_tests/runtime/engine/test_step_outputs.py)."""
    train(3, str(tmp_path))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "steps.json")]) == 0
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    plan = build_plan(PlanSpec("1f1b", 2, 1, 4))
    for rank in range(2):
        shown = [event for event in events if event["ph"] == "X" and event["pid"] == rank and event["tid"] in (0, 1)]
        names = {event["name"] for event in shown}
        planned = {str(at) for at in each(plan.programs[rank])}
        assert names <= planned
        sent = {event["name"] for event in events if event["pid"] == rank and event.get("tid") in range(2, 6)}
        sent -= {"transfer", "thread_name", "thread_sort_index"}
        assert sent == {name for name in planned if name.startswith(("SEND", "RECV"))}
        assert {str(at) for at in plan.programs[rank] if at.op in COMPUTE_OPS} <= names
        assert len([event for event in shown if event["tid"] == 0]) == 2 * 8, "of the steps 2 and 3"


def test_metrics_count_compute_and_waits_separately() -> None:
    found = metrics_of(PROGRAM, [0.0, 1.0, 4.0, 4.5], [1.0, 4.0, 4.25, 5.0])
    assert found == StepMetrics(pipeline=5.0, compute=3.0, exposed_wait=1.5)
    assert found.bubble == pytest.approx(0.4)
    assert metrics_of((), [], []).bubble == 0.0


class Event:
    """An event of a device that has reached the time ``now``."""

    now = 0.0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= Event.now

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Events:
    """A pool whose events come a millisecond after each other."""

    def __init__(self) -> None:
        self.made = 0.0
        self.back: list[Event] = []

    def record(self) -> Event:
        self.made += 1.0
        return Event(self.made)

    def give_back(self, event: Event) -> None:
        self.back.append(event)


def on_device(meter: Any, step: int, told: dict[int, StepMetrics]) -> None:
    one = _OnDevice(meter, step, PROGRAM, told.__setitem__)
    one.start()
    for at in PROGRAM:
        one.begin(at)
        one.end(at)
    one.finish()


def test_device_times_are_read_later_without_waiting_for_the_device() -> None:
    meter, told = Meter(events=Events()), dict[int, StepMetrics]()  # type: ignore[arg-type]
    Event.now = 0.0
    on_device(meter, 1, told)
    on_device(meter, 2, told)
    assert told == {}, "the device is in the first step"
    Event.now = 8.0
    on_device(meter, 3, told)
    assert told == {1: StepMetrics(0.007, 0.001, 0.002)}
    Event.now = 8.0
    for step in range(4, 12):
        on_device(meter, step, told)
    assert [*told] == [1], "the oldest, step 2, is dropped"
    Event.now = 1e9
    on_device(meter, 12, told)
    assert [*told] == [1, *range(3, 12)]


def test_a_step_on_a_virtual_gpu_synchronises_no_more_than_without() -> None:
    calls, numbers = list[str](), list[Any]()

    def counted(kind: Any) -> Any:
        original = kind.synchronize

        def synchronize(self: Any) -> None:
            calls.append(kind.__name__)
            original(self)

        return mock.patch.object(kind, "synchronize", synchronize)

    loop: Any = ModuleType("megatron.training.global_vars")
    loop.get_tensorboard_writer = lambda: SimpleNamespace(add_scalar=lambda *told: numbers.append(told))
    with mock.patch.dict(sys.modules, {loop.__name__: loop}):
        for fields in ({}, {"metrics": lambda *told: numbers.append(told)}, {"metrics": 1}):
            with counted(cuda.Event), counted(cuda.Stream):
                report, _ = step_on_nccl(2, 1, ToyData(4), overlap_p2p_comm=True, **fields)
            assert not report.races, str(report)
            calls.append("end")
    ends = [place for place, call in enumerate(calls) if call == "end"]
    first, *others = (sorted(calls[begin:end]) for begin, end in pairwise([0, *ends]))
    assert all([call for call in other if call != "end"] == first for other in others)
    assert numbers == [], "they come when a later step begins"


def test_a_number_needs_megatrons_writer(caplog: pytest.LogCaptureFixture) -> None:
    pipeline(2, 1, 2, lambda rank: rank.step(rank.model(ToyBlock)), metrics=10)
    (warning,) = [one.message for one in caplog.records if "metrics=10" in one.message]
    assert "give --tensorboard-dir, or a function metrics(step, numbers)" in warning
