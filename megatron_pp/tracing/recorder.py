"""Recording of real steps: when every instruction began and ended, on every rank.

Off unless ``config.trace_dir`` names a folder; the setting must be the same on all ranks of a pipeline. Each rank then
writes its own file there; ``megatron-pp report`` merges them. ``config.trace_steps`` lists the training steps to
record, by default 2 to 21, so that a forgotten setting does not fill a disk.

On CPUs times are the monotonic clock's. On GPUs they are those of CUDA events on the current stream: what the stream
did and what it waited for. They are read when the next recorded step begins, or at exit; nothing is synchronised within
a step. Before the first recorded step and every sixteenth after it the ranks compare their clocks (``clock_sync.py``).
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_pp.comm.events import EventPool
from megatron_pp.comm.transport import Transport
from megatron_pp.common.finalizers import call_if_alive, call_in
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.conversions import chosen_steps
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.tracing import files
from megatron_pp.tracing.clock_sync import agree_on_clocks
from megatron_pp.tracing.observers import Observer
from megatron_pp.tracing.step_observer import StepObserver

logger = logging.getLogger("megatron_pp")

_STEPS_BETWEEN_SYNCS = 16

# A tracer belongs to a model, and is dropped with it. Ranks make their models in one order, so their numbers agree.
_NUMBERS = itertools.count()
_TRACERS: ObjectTable[Tracer] = ObjectTable()


def flush_traces() -> None:
    """Write the steps on GPUs whose times were not read yet. Waits for those steps."""
    for _, tracer in _TRACERS.items():
        tracer.resolve_pending()


class _Traced(StepObserver):
    """The recording of a training step, if it is a chosen one. Steps are counted per model."""

    def observers(self, step: Any, plan: Plan, size: float) -> Sequence[Observer]:
        if plan.spec.forward_only:
            return []
        model = step.inputs.chunks[0]
        settings = step.settings
        tracer = _TRACERS.get(model)
        if tracer is None or tracer.folder != settings.trace_dir:
            steps = chosen_steps(settings.traced_steps)
            transport = step.communicator.transport
            tracer = _TRACERS[model] = Tracer(settings.trace_dir, steps, transport, settings.trace_first_step)
        tracer.follow(step.communicator.transport)
        recording = tracer.next_step(plan, size)
        return [] if recording is None else [recording]


def step_observer(step: Any) -> StepObserver:
    """The observer that traces ``step``."""
    return _Traced()


class Keeper:
    """Takes recorded steps. ``keep`` takes each once its times are known: on CPUs when the step is over, on GPUs
    in ``resolve_pending``. Times are nanoseconds of ``clock``."""

    transport: Transport

    def __init__(self, transport: Transport) -> None:
        self.follow(transport)
        self.clock: Callable[[], int] = time.perf_counter_ns
        self.pending: list[_CudaRecording] = []
        self.events = EventPool(timing=True)

    def follow(self, transport: Transport) -> None:
        """Set the transport of the steps to come. It is kept weakly, because this object belongs to a model, which may
        outlive the transport."""
        self.transport = weakref.proxy(transport)
        self.rank = transport.rank

    def recording(self, plan: Plan, step: int, size: float = 0.0) -> Recording:
        kind = _CudaRecording if self.transport.device.type == "cuda" else Recording
        return kind(self, plan, step, size)

    def before(self, plan: Plan, size: float) -> int:
        """Called when a recorded step begins, with what ``recording`` was given. Returns the plan's number, for
        ``keep``."""
        return 0

    def keep(self, plan: Plan, record: files.StepRecord) -> None:
        raise NotImplementedError

    def resolve_pending(self) -> None:
        """Read the times of GPU steps that have finished; called where waiting for them costs nothing."""
        for recording in self.pending:
            self.keep(recording.plan, recording.resolved())
        self.pending.clear()


class Tracer(Keeper):
    """One rank's trace of one model: counts steps, compares clocks, writes the file. A disk error ends the trace, never
    the training."""

    def __init__(self, folder: str, steps: Sequence[range], transport: Transport, first_step: int = 1) -> None:
        super().__init__(transport)
        self.number = next(_NUMBERS)
        self.folder = folder
        self.steps = steps
        self.step = first_step - 1
        self.recorded = 0
        self.plans: dict[PlanSpec, int] = {}
        self.path: Path | None = None  # of the file; None before it is made
        self.broken = False

    def next_step(self, plan: Plan, size: float) -> Recording | None:
        """Count the step that starts now, and return its recording if it is chosen."""
        self.step += 1
        if not any(self.step in chosen for chosen in self.steps):
            return None
        return self.recording(plan, self.step, size)

    def before(self, plan: Plan, size: float) -> int:
        """Write all that precedes a step of ``plan`` in the file. Returns the plan's number."""
        if self.recorded % _STEPS_BETWEEN_SYNCS == 0:
            self._compare_clocks()
        self.recorded += 1
        if plan.spec not in self.plans:
            self.plans[plan.spec] = len(self.plans)
            self.write(files.plan_line(plan, self.rank, size))
        return self.plans[plan.spec]

    def keep(self, plan: Plan, record: files.StepRecord) -> None:
        self.write(files.step_line(record))

    def _compare_clocks(self) -> None:
        run = self._run_number() if self.rank == 0 else 0
        agreed = agree_on_clocks(self.transport, self.clock, run)
        if self.path is None:
            self._make_file(f"{agreed.run:x}")
        self.write(files.sync_line(self.clock(), agreed.ahead))

    def _make_file(self, run: str) -> None:
        ranks = tuple(map(self.transport.global_rank, range(self.transport.size)))
        header = files.RunHeader(run, self.transport.rank, ranks, self.transport.device.type, socket.gethostname())
        self.path = Path(self.folder, header.file_name)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # of the same job's attempt before a restart
        except OSError as error:
            self._give_up(error)
        self.write(files.header_line(header))

    def write(self, line: str) -> None:
        if self.broken or self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as out:
                out.write(line)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.broken = True
        logger.warning("tracing stops: %s cannot be written (%s)", self.path, error)

    def _run_number(self) -> int:
        """Microseconds since 1970 and some random bits: sorted by time, and different for runs that start together. The
        same for all pipelines of one job: its store keeps the first one that is made for the model."""
        mine = time.time_ns() // 1000 << files.RUN_RANDOM_BITS | secrets.randbits(files.RUN_RANDOM_BITS)
        store = self.transport.store
        return mine if store is None else int(store.compare_set(f"megatron_pp/trace/run/{self.number}", "", str(mine)))


@dataclass(eq=False)
class Recording:
    """One step that is being recorded, by the monotonic clock. ``start`` is called right before its first instruction,
    with all ranks' channels prepared (collective over the pipeline), ``finish`` after the last one."""

    keeper: Keeper
    plan: Plan
    step: int
    size: float

    def __post_init__(self) -> None:
        self.clock = self.keeper.clock
        self.number = 0  # of the plan, in the file
        self.begun: list[Any] = []
        self.ended: list[Any] = []

    def start(self) -> None:
        self.number = self.keeper.before(self.plan, self.size)

    def begin(self, at: Instruction) -> None:
        self.begun.append(self.clock())

    def end(self, at: Instruction) -> None:
        self.ended.append(self.clock())

    def finish(self) -> None:
        base = self.begun[0] if self.begun else self.clock()
        starts = [t - base for t in self.begun]
        ends = [t - base for t in self.ended]
        self.keeper.keep(self.plan, files.StepRecord(self.step, self.number, base, starts, ends))


class _CudaRecording(Recording):
    """CUDA events on the current stream, read after the step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.origin: Any = None  # an event, and the host's time at it
        self.base = 0

    def start(self) -> None:
        super().start()
        # The one synchronisation, before the step: the moment at which the device's time and the host's are the same.
        torch.cuda.synchronize(self.keeper.transport.device)
        self.keeper.resolve_pending()
        self.origin = self.keeper.events.record()
        self.origin.synchronize()
        self.base = self.clock()

    def begin(self, at: Instruction) -> None:
        self.begun.append(self.keeper.events.record())

    def end(self, at: Instruction) -> None:
        self.ended.append(self.keeper.events.record())

    def finish(self) -> None:
        if not self.keeper.pending:
            resolve = weakref.WeakMethod(self.keeper.resolve_pending)
            atexit.register(call_in, os.getpid(), call_if_alive, resolve)
        self.keeper.pending.append(self)

    def resolved(self) -> files.StepRecord:
        """The step's times; waits for its last event."""
        if self.ended:
            self.ended[-1].synchronize()
        starts, ends = ([round(self.origin.elapsed_time(e) * 1e6) for e in es] for es in (self.begun, self.ended))
        for event in (self.origin, *self.begun, *self.ended):
            self.keeper.events.give_back(event)
        return files.StepRecord(self.step, self.number, self.base, starts, ends)
