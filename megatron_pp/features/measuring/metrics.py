"""How long this rank computed and waited in a training step, for plots of a run that goes on (``config.metrics``).

Instructions are timed as a trace times them. On GPUs the times are of CUDA events, which are read once the device has
passed them: nothing waits for the device, and numbers come when a later step begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_pp.comm.events import EventPool
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.instruction import COLLECTIVE_WAITS, COMPUTE_OPS, COPY_OF, FREE_OPS, WAIT_OPS, Instruction
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.tracing.observers import Observer
from megatron_pp.tracing.step_observer import StepObserver

_WAITS = WAIT_OPS | FREE_OPS | COLLECTIVE_WAITS | frozenset(COPY_OF)
_MOST_PENDING = 8  # steps on a GPU; a host that is further ahead drops the oldest


class StepMetrics(NamedTuple):
    """Times of one rank, in seconds: from its first instruction to the end of its last one, the compute in that time,
    and the waits for other ranks or for copies."""

    pipeline: float
    compute: float
    exposed_wait: float

    @property
    def bubble(self) -> float:
        """The share of the time in which the rank did not compute."""
        return 1.0 - self.compute / self.pipeline if self.pipeline else 0.0


Sink = Callable[[int, StepMetrics], None]
"""Takes the number of a step, and what was measured in it. With a method ``takes(step)``, of some steps alone. With a
method ``of_pipeline(transport)``, what that returns takes its place in each step; None: nothing is measured."""


# Each belongs to a model and is dropped with it, as tracers are.
_METERS: ObjectTable[Meter] = ObjectTable()


def step_observer(step: Any) -> StepObserver | None:
    """The observer that measures ``step``; None for an evaluation, and if nothing uses the numbers."""
    if step.inputs.forward_only:
        return None
    asked = step.settings.metrics
    sink: Sink | None = asked if callable(asked) else load("megatron_scalars").scalars(asked)
    if sink is None:
        return None
    model = step.inputs.chunks[0]
    meter = _METERS.get(model)
    if meter is None:
        meter = _METERS[model] = Meter()
    meter.sink = sink
    return meter


def metrics_of(program: Sequence[Instruction], starts: Sequence[float], ends: Sequence[float]) -> StepMetrics:
    """The metrics of a rank's program (``Plan.timed``), from the seconds at which each instruction began and ended."""
    compute = waits = 0.0
    for at, start, end in zip(program, starts, ends, strict=True):
        if at.op in COMPUTE_OPS:
            compute += end - start
        elif at.op in _WAITS:
            waits += end - start
    return StepMetrics(ends[-1] - starts[0] if ends else 0.0, compute, waits)


@dataclass
class Meter(StepObserver):
    """Measures the steps of one model, and counts them if the program has no numbers for them. ``sink``: the sink of
    the step that begins."""

    sink: Sink | None = None
    step: int = 0
    pending: deque[_OnDevice] = field(default_factory=deque)
    events: EventPool = field(default_factory=lambda: EventPool(timing=True))

    def observers(self, step: Any, plan: Plan, size: float) -> Sequence[Observer]:
        self.step = self.step + 1 if step.number is None else step.number
        sink = self.sink
        if sink is None:
            return ()
        communicator = step.communicator
        of_pipeline = getattr(sink, "of_pipeline", None)
        if of_pipeline is not None:
            sink = of_pipeline(communicator.transport)
        takes = getattr(sink, "takes", None)
        if sink is None or (takes is not None and not takes(self.step)):
            return ()
        program = plan.timed(communicator.rank)
        kind = _OnDevice if communicator.device.type == "cuda" else _OnHost
        return (kind(self, self.step, program, sink),)

    def take_finished(self) -> None:
        """Hand over the steps whose last event the device has passed."""
        while self.pending and (self.pending[0].passed() or len(self.pending) > _MOST_PENDING):
            self.pending.popleft().hand_over()


@dataclass(eq=False)
class _OnHost:
    """One step, by the monotonic clock."""

    meter: Meter
    step: int
    program: Sequence[Instruction]
    sink: Sink
    begun: list[Any] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)

    def start(self) -> None:
        pass

    def begin(self, at: Instruction) -> None:
        self.begun.append(time.perf_counter())

    def end(self, at: Instruction) -> None:
        self.ended.append(time.perf_counter())

    def finish(self) -> None:
        self.sink(self.step, metrics_of(self.program, self.begun, self.ended))


class _OnDevice(_OnHost):
    """One step, by CUDA events on the current stream."""

    def start(self) -> None:
        self.meter.take_finished()

    def begin(self, at: Instruction) -> None:
        self.begun.append(self.meter.events.record())

    def end(self, at: Instruction) -> None:
        self.ended.append(self.meter.events.record())

    def finish(self) -> None:
        if self.ended:
            self.meter.pending.append(self)

    def passed(self) -> bool:
        return bool(self.ended[-1].query())

    def hand_over(self) -> None:
        """Hand over the times of the step. A step that the device has not reached yet is dropped, because reading its
        times would wait for the device."""
        if self.passed():
            first = self.begun[0]
            starts, ends = ([1e-3 * first.elapsed_time(e) for e in events] for events in (self.begun, self.ended))
            self.sink(self.step, metrics_of(self.program, starts, ends))
            for event in (*self.begun, *self.ended):
                self.meter.events.give_back(event)
