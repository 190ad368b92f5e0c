"""Overlap on virtual devices: what runs beside what, and that each step takes what the simulator says of its plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_pp.comm.collectives import OnStream
from megatron_pp.features.offload.host_copies import _StreamCopies
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import Link, Network
from megatron_pp.plan.ir.spec import BATCHED, ONE_QUEUE, PLAIN, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.runtime.engine.executor import PlanExecutor
from testkit.device_runs.stream_runs import on_one_device, plan_on_streams
from testkit.device_runs.virtual_timelines import MESSAGE, SLOT, TimedStep, costs_of, timed_output_layer, timed_step
from testkit.mutants.stream_mutants import (
    SendsOnComputeStream,
    TransfersOnComputeStream,
    WaitsAtOnce,
    forwards_on_the_side,
)
from testkit.streams import LATER_STEPS
from testkit.streams.call_log import CallLog
from testkit.streams.virtual_times import Timelines, timelines
from testkit.sweeps import EXHAUSTIVE, drawn
from testkit.thread_runs.output_layer_runs import Case

FAMILIES = [name for name, family in SCHEDULES.items() if family.search is None and not family.barriers]
SEARCHED = [name for name, family in SCHEDULES.items() if family.search is not None]
PAIRED = [name for name in FAMILIES if name != "pipe_offload"]


def spec_of(schedule: str, size: int, chunks: int, **more: Any) -> PlanSpec:
    family = SCHEDULES[schedule]
    return PlanSpec(schedule, size, family.chunks or chunks, 8, slices=2 if family.sliced else 1, **more)


def on_four(schedules: list[str], turn: int) -> list[tuple[str, int, int]]:
    """Every second schedule of ``schedules``, on four ranks with chunks in turn. The others have ``1 - turn``."""
    sizes = [(name, 4, 1 + n % 3) for n, name in enumerate(FAMILIES) if EXHAUSTIVE or n % 2 == turn]
    return [one for one in sizes if one[0] in schedules]


def furthest(step: TimedStep, sign: int = 0) -> tuple[float, str]:
    """The largest difference from the simulator's times, and whose it is; with ``sign`` in that direction alone."""
    found = {name: sign * off if sign else abs(off) for name, off in step.differences().items()}
    return max((off, name) for name, off in found.items())


# -- the times themselves ----------------------------------------------------------------------------------------------


def played(program: Callable[[], Any], **durations: float) -> tuple[dict[str, tuple[float, float]], Timelines]:
    """When each range of ``program``, on one device, begins and ends, and all that it runs."""
    log = CallLog()
    on_one_device(program, log=log)
    lines = timelines(log.records, {(0, name): time for name, time in durations.items()}, Network())
    starts = {one.within: one.start for one in reversed(lines.operations) if one.within}
    ends = {one.within: one.end for one in lines.operations}
    return {name: (start, ends[name]) for name, start in starts.items()}, lines


@pytest.mark.parametrize("wait", ["", "event", "host"])
def test_streams_run_beside_each_other_until_one_waits(wait: str) -> None:
    def program() -> None:
        x, side = torch.zeros(8), torch.cuda.Stream()
        with torch.cuda.nvtx.range("a"):
            x = x.add_(1).mul_(2)
        if wait == "event":
            side.wait_stream(torch.cuda.current_stream())
        elif wait == "host":
            torch.cuda.synchronize()
        with torch.cuda.nvtx.range("b"), torch.cuda.stream(side):
            y = torch.zeros(8)
        with torch.cuda.nvtx.range("c"):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.nvtx.range("d"):
            x.add_(y)

    found, lines = played(program, a=2.0, b=3.0, c=0.5, d=1.0)
    began = 2.0 if wait else 0.0
    assert found == {"a": (0.0, 2.0), "b": (began, began + 3.0), "c": (2.0, 2.5), "d": (began + 3.0, began + 4.0)}
    of_a = [(one.what, one.start, one.end) for one in lines.operations if one.within == "a"]
    assert of_a == [("add_", 0.0, 1.0), ("mul_", 1.0, 2.0)], "the time of a range is shared evenly"


@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_transfers_take_turns_on_their_link(latency: float) -> None:
    log = CallLog()
    plan_on_streams(PlanSpec("gpipe", 2, 1, 4, forward_only=True), log=log)
    network = Network(link=Link(latency, 64.0))
    found = timelines(log.records, {}, network).transfers
    assert [(one.source, one.target, one.nbytes) for one in found] == [(0, 1, 64)] * 4
    each = 1 + latency  # a communicator begins the next one when this one is there
    assert [(one.start, one.end) for one in found] == [(n * each, (n + 1) * each) for n in range(4)]


# -- each schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "size", "chunks"),
    [
        *((name, 2, 2) for name in FAMILIES),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in on_four(FAMILIES, 0)),
    ],
)
def test_a_step_takes_what_its_plan_is_simulated_to_take(schedule: str, size: int, chunks: int) -> None:
    """Each forward, backward, weight gradient, copy and transfer begins and ends when the simulator says."""
    step = timed_step(spec_of(schedule, size, chunks))
    assert furthest(step)[0] < 1e-6, furthest(step)
    assert not step.report.races, str(step.report)


@pytest.mark.parametrize("schedule", SEARCHED)
def test_a_searched_order_takes_what_its_plan_is_simulated_to_take(schedule: str) -> None:
    costs = costs_of(4)
    measured = Measured(costs.forward, costs.backward_input, costs.weight, transfer=MESSAGE)
    step = timed_step(PlanSpec(schedule, 2, 2, 8, measured=measured))
    assert furthest(step)[0] < 1e-6, furthest(step)
    assert not step.report.races, str(step.report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "schedule", "policy"),
    [
        one
        for k, policy in enumerate((BATCHED, PLAIN))
        for one in drawn(((n, name, policy) for n, name in enumerate(FAMILIES) if EXHAUSTIVE or n // 2 % 2 == k), 5)
    ],
)
def test_under_other_policies_a_step_takes_what_its_plan_is_simulated_to_take(
    n: int, schedule: str, policy: str
) -> None:
    """Where the engine waits for its sends where the plan says. By default it goes on, and ends no later. Policies and
    sizes take turns. A run draws five schedules of each policy."""
    spec = spec_of(schedule, 2 + 2 * (n % 2), 2, policy=policy)
    step = timed_step(spec, partial(PlanExecutor, max_pending_sends=0))
    assert furthest(step)[0] < 1e-6, furthest(step)
    ahead = timed_step(spec)
    assert furthest(ahead, sign=1)[0] < SLOT, furthest(ahead, sign=1)
    assert ahead.makespan < step.makespan + 1e-6


@pytest.mark.parametrize("schedule", ["pipe_offload", "interleaved_1f1b"])
def test_copies_to_the_host_run_beside_compute(schedule: str) -> None:
    step = timed_step(spec_of(schedule, 2, 2, offload_chunks=1))
    assert furthest(step)[0] < 1e-6, furthest(step)
    copies = {key: times for key, times in step.spans.items() if key[1].startswith(("OFFLOAD", "LOAD"))}
    assert len(copies) >= 16
    compute = {key: times for key, times in step.spans.items() if key not in copies}
    alone = []
    for (rank, name), (start, end) in copies.items():
        own = {key: times for key, times in compute.items() if key[0] == rank}
        assert not any(step.streams[rank, name] & step.streams[key] for key in own)
        if not any(begin < end and start < until for begin, until in own.values()):
            alone.append((rank, name))
    assert len(alone) < len(copies) / 4, alone


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["vocab_1f1b", "vocab_1f1b_alg1"])
def test_collectives_run_beside_compute(schedule: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a slot of the simulated times. Of more than two ranks a simulated collective waits for the last one, and a
    virtual broadcast gives each rank its part when that rank is there, so some ranks may be earlier."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    step = timed_output_layer(Case(schedule, size, 8))
    late, early = (max(sign * off for off in step.computing().values()) for sign in (1, -1))
    assert late < SLOT
    assert early < SLOT or size > 2
    with monkeypatch.context() as patch:
        patch.setattr(OnStream, "__init__", _on_compute_stream(OnStream.__init__))
        slow = timed_output_layer(Case(schedule, size, 8))
    assert not slow.report.races, "the race check does not tell"
    assert max(slow.computing().values()) > SLOT


def _on_compute_stream(init: Callable[..., None]) -> Callable[..., None]:
    def run(self: OnStream, collective: Any, collectives: Any, stream: Any) -> None:
        init(self, collective, collectives, torch.cuda.current_stream())

    return run


# -- pairs -------------------------------------------------------------------------------------------------------------


def shared(step: TimedStep) -> list[tuple[int, str, str]]:
    """The pairs whose halves share a stream, or do not run at the same time; gradients are added up beside the rest of
    a backward, which then ends earlier."""
    found = []
    for rank, forward, backward in step.pairs():
        streams, spans = ([table[rank, half] for half in (forward, backward)] for table in (step.streams, step.spans))
        if streams[0] & streams[1] or spans[0] != pytest.approx(spans[1], abs=MESSAGE):
            found.append((rank, forward, backward))
    return found


@pytest.mark.parametrize(
    ("schedule", "size", "chunks"),
    [
        *((name, 2, 2) for name in drawn(PAIRED, 10)),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in drawn(on_four(PAIRED, 1), 4)),
    ],
)
def test_the_halves_of_a_pair_run_beside_each_other(schedule: str, size: int, chunks: int) -> None:
    """All of them, and the step is the simulated one, but for two messages of a pair that are ready at one time. With
    slices it is earlier: of these, gradients of parameters are added up beside the rest of the backward."""
    step = timed_step(spec_of(schedule, size, chunks, overlap_pairs=True))
    assert not shared(step)
    assert furthest(step, sign=1)[0] < MESSAGE, furthest(step, sign=1)
    assert furthest(step, sign=-1)[0] < MESSAGE or step.plan.spec.num_parts > 1, furthest(step, sign=-1)
    assert not step.report.races, str(step.report)


@pytest.mark.parametrize("function", [forwards_on_the_side, in_turn])
@pytest.mark.parametrize("schedule", ["dualpipe_v", "combined_1f1b", "interleaved_1f1b"])
def test_pairs_that_share_a_stream_are_late_and_no_race(schedule: str, function: Any) -> None:
    step = timed_step(spec_of(schedule, 2, 2, overlap_pairs=True), pairs=function)
    assert len(shared(step)) > len(step.pairs()) // 2
    assert furthest(step, sign=1)[0] > 10 * SLOT
    assert not step.report.races, "the race check does not tell"


# -- engines that lose time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", [{"executor": WaitsAtOnce}, {"kind": SendsOnComputeStream}], ids=str)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_an_engine_that_does_not_overlap_is_late_and_no_race(schedule: str, mutant: dict[str, Any]) -> None:
    step = timed_step(spec_of(schedule, 2, 2), **mutant)
    assert furthest(step, sign=1)[0] > SLOT, furthest(step, sign=1)
    assert not step.report.races, "the race check does not tell"


def test_receives_that_are_posted_ahead_on_the_compute_stream_never_end() -> None:
    spec = spec_of("interleaved_1f1b", 2, 2, device=(ONE_QUEUE,))
    report = plan_on_streams(spec, kind=TransfersOnComputeStream, rules=LATER_STEPS)
    assert not report.races, "the race check does not tell"
    with pytest.raises(RuntimeError, match=r"the devices hang, first at the receive from rank \d \(.\) of rank \d"):
        timed_step(spec, kind=TransfersOnComputeStream)


def test_copies_on_the_compute_stream_are_late_and_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    init = _StreamCopies.__init__

    def on_compute_stream(self: _StreamCopies, device: torch.device) -> None:
        init(self, device)
        self._streams = [torch.cuda.current_stream()] * 2

    monkeypatch.setattr(_StreamCopies, "__init__", on_compute_stream)
    step = timed_step(spec_of("pipe_offload", 2, 2))
    assert furthest(step, sign=1)[0] > SLOT, furthest(step, sign=1)
    assert not step.report.races, "the race check does not tell"
