"""Recording of what a step really did: when every instruction began and ended, on every rank.

Off unless ``config.trace_dir`` (or the environment variable MEGATRON_PP_TRACE_DIR) names a folder; the setting must be
the same on all ranks of a pipeline. Each rank then writes a file of its own there, which ``megatron-pp report`` puts
together. Recorded are the training steps that ``config.trace_steps`` (MEGATRON_PP_TRACE_STEPS) lists, as in "3,10-12";
by default 2 to 21, so that a forgotten setting does not fill a disk. Steps count from 1 in this process, or from
``config.trace_first_step`` where there is such a field, as after a resume.

On CPUs times are the monotonic clock's. On GPUs they are those of CUDA events on the current stream: what the stream
did and what it waited for. They are read when the next recorded step begins, or at exit; nothing is synchronised
within a step. Before the first recorded step and every sixteenth after it the ranks compare their clocks
(``clock_sync.py``).
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_pp.comm.transport import Transport
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.instruction import Instruction
from megatron_pp.plan.spec import Plan, PlanSpec
from megatron_pp.tracing.clock_sync import agree_on_clocks
from megatron_pp.tracing.files import RunHeader, StepRecord, header_line, plan_line, step_line, sync_line

logger = logging.getLogger("megatron_pp")

_DEFAULT_STEPS = "2-21"
_MOST_DIGITS = 18  # of a step number
_STEPS_BETWEEN_SYNCS = 16

# A tracer belongs to a model, and goes with it. Ranks make their models in one order, so their numbers agree.
_NUMBERS = itertools.count()
_TRACERS: weakref.WeakKeyDictionary[Any, Tracer] = weakref.WeakKeyDictionary()


class Observer(Protocol):
    """What the engine calls around every instruction."""

    def begin(self, at: Instruction) -> None: ...

    def end(self, at: Instruction) -> None: ...


class Recording(Observer, Protocol):
    """One step that is being recorded."""

    def start(self) -> None:
        """Right before the first instruction, with all ranks' channels prepared. Collective over the pipeline."""
        ...

    def finish(self) -> None:
        """After the last instruction."""
        ...


def flush_traces() -> None:
    """Write what is still to be written: steps on GPUs whose times were not read yet. Waits for those steps."""
    for tracer in list(_TRACERS.values()):
        tracer.resolve_pending()


def traced_steps(settings: StepSettings) -> str:
    """Which training steps are recorded, as in ``3,10-12``; empty where tracing is off."""
    return (settings.trace_steps or _DEFAULT_STEPS) if settings.trace_dir else ""


def chosen_steps(text: str) -> list[range]:
    """``3,10-12`` -> the steps 3, 10, 11, 12. Raises ScheduleInputError."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_step(first) or (dash and not _is_step(last)) or (dash and int(last) < int(first)):
            raise ScheduleInputError(f"trace_steps is {text!r}; it must list steps, as in 3,10-12")
        ranges.append(range(int(first), int(last or first) + 1))
    return ranges


def _is_step(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS


def step_recording(
    model: Any, settings: StepSettings, plan: Plan, transport: Transport, size: float
) -> Recording | None:
    """What records the training step that starts now; None where it is not to be recorded.

    ``model`` (steps are counted per model) is this rank's first chunk; ``size`` is the bytes of an activation.
    """
    folder = settings.trace_dir
    if not folder or plan.spec.forward_only:
        return None
    tracer = _TRACERS.get(model)
    if tracer is None or tracer.folder != folder:
        steps = chosen_steps(traced_steps(settings))
        tracer = _TRACERS[model] = Tracer(folder, steps, transport, settings.trace_first_step)
    return tracer.next_step(plan, size)


def observers(*candidates: Observer | None) -> Observer | None:
    """One observer for all that are not None; None where all are."""
    found = [one for one in candidates if one is not None]
    return _Several(found) if len(found) > 1 else next(iter(found), None)


class _Several:
    """Observers one within the other."""

    def __init__(self, inside: Sequence[Observer]) -> None:
        self.inside = inside

    def begin(self, at: Instruction) -> None:
        for one in self.inside:
            one.begin(at)

    def end(self, at: Instruction) -> None:
        for one in reversed(self.inside):
            one.end(at)


class Tracer:
    """One rank's trace of one model: counts steps, compares clocks, writes the file."""

    def __init__(self, folder: str, steps: Sequence[range], transport: Transport, first_step: int = 1) -> None:
        self.number = next(_NUMBERS)
        self.folder = folder
        self.steps = steps
        self.transport = transport
        self.step = first_step - 1
        self.recorded = 0
        self.clock: Callable[[], int] = time.perf_counter_ns
        self.plans: dict[PlanSpec, int] = {}
        self.file: _TraceFile | None = None
        self.pending: list[_CudaRecording] = []

    def next_step(self, plan: Plan, size: float) -> Recording | None:
        """Count the step that starts now, and return what records it where it was chosen."""
        self.step += 1
        if not any(self.step in chosen for chosen in self.steps):
            return None
        if self.transport.device.type == "cuda":
            return _CudaRecording(self, plan, self.step, size)
        return _CpuRecording(self, plan, self.step, size)

    def before(self, plan: Plan, size: float) -> int:
        """Everything that has to stand in the file before a step of ``plan``. Returns the plan's number."""
        if self.recorded % _STEPS_BETWEEN_SYNCS == 0:
            self._compare_clocks()
        self.recorded += 1
        if plan.spec not in self.plans:
            self.plans[plan.spec] = len(self.plans)
            self._write(plan_line(plan, self.transport.rank, size))
        return self.plans[plan.spec]

    def write_step(self, record: StepRecord) -> None:
        self._write(step_line(record))

    def resolve_pending(self) -> None:
        """Read the times of GPU steps that have finished; called where waiting for them costs nothing."""
        for recording in self.pending:
            self.write_step(recording.resolved())
        self.pending.clear()

    def _compare_clocks(self) -> None:
        agreed = agree_on_clocks(self.transport, self.clock, self._run_number() if self.transport.rank == 0 else 0)
        if self.file is None:
            ranks = tuple(self.transport.global_rank(r) for r in range(self.transport.size))
            run = f"{agreed.run:x}"
            header = RunHeader(run, self.transport.rank, ranks, self.transport.device.type, socket.gethostname())
            self.file = _TraceFile(Path(self.folder), header)
        self._write(sync_line(self.clock(), agreed.ahead))

    def _write(self, line: str) -> None:
        if self.file is not None:
            self.file.write(line)

    def _run_number(self) -> int:
        """Microseconds since 1970 and 12 random bits: sorted by time, and different for runs that start together.

        Pipelines of one job have to have the same: the job's store keeps the first one that is made for the model.
        """
        mine = time.time_ns() // 1000 << 12 | int.from_bytes(os.urandom(2), "big") >> 4
        store = self.transport.store
        if store is None:
            return mine
        return int(store.compare_set(f"megatron_pp/trace/run/{self.number}", "", str(mine)))


class _TraceFile:
    """The file of one rank. A disk that fails ends the trace, never the training."""

    def __init__(self, folder: Path, header: RunHeader) -> None:
        self.path = folder / header.file_name
        self.broken = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # of the same job's attempt before a restart
        except OSError as error:
            self._give_up(error)
        self.write(header_line(header))

    def write(self, line: str) -> None:
        """Append one line."""
        if self.broken:
            return
        try:
            with self.path.open("a", encoding="utf-8") as out:
                out.write(line)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.broken = True
        logger.warning("tracing stops: %s can not be written (%s)", self.path, error)


def message_bytes(shapes: Any, dtype: torch.dtype | None) -> float:
    """Bytes of a message of ``shapes`` (one, or a list or dict of them) in ``dtype``; 0 where they are not known."""
    if shapes is None or dtype is None:
        return 0.0
    if isinstance(shapes, dict):
        return sum(message_bytes(shape, dtype) for shape in shapes.values())
    if all(isinstance(n, int) for n in shapes):
        return float(math.prod(shapes)) * dtype.itemsize
    return sum(message_bytes(shape, dtype) for shape in shapes)


class _CpuRecording:
    """Times of the monotonic clock."""

    def __init__(self, tracer: Tracer, plan: Plan, step: int, size: float) -> None:
        self.tracer = tracer
        self.plan = plan
        self.step = step
        self.size = size
        self.clock = tracer.clock
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.number = 0

    def start(self) -> None:
        self.number = self.tracer.before(self.plan, self.size)

    def begin(self, at: Instruction) -> None:
        self.starts.append(self.clock())

    def end(self, at: Instruction) -> None:
        self.ends.append(self.clock())

    def finish(self) -> None:
        base = self.starts[0] if self.starts else self.clock()
        starts, ends = [t - base for t in self.starts], [t - base for t in self.ends]
        self.tracer.write_step(StepRecord(self.step, self.number, base, starts, ends))


class _CudaRecording:
    """CUDA events on the current stream, read after the step."""

    def __init__(self, tracer: Tracer, plan: Plan, step: int, size: float) -> None:
        self.tracer = tracer
        self.plan = plan
        self.step = step
        self.size = size
        self.begun: list[torch.cuda.Event] = []
        self.ended: list[torch.cuda.Event] = []
        self.origin = torch.cuda.Event(enable_timing=True)
        self.base = 0
        self.number = 0

    def start(self) -> None:
        self.number = self.tracer.before(self.plan, self.size)
        # The one synchronisation, before the step: the moment at which the device's time and the host's are the same.
        torch.cuda.synchronize(self.tracer.transport.device)
        self.tracer.resolve_pending()
        self.origin.record()
        self.origin.synchronize()
        self.base = self.tracer.clock()

    def begin(self, at: Instruction) -> None:
        self.begun.append(_recorded_event())

    def end(self, at: Instruction) -> None:
        self.ended.append(_recorded_event())

    def finish(self) -> None:
        if not self.tracer.pending:
            atexit.register(_resolve_at_exit, weakref.ref(self.tracer))
        self.tracer.pending.append(self)

    def resolved(self) -> StepRecord:
        """The step's times; waits for its last event."""
        if self.ended:
            self.ended[-1].synchronize()
        starts, ends = [self._after(e) for e in self.begun], [self._after(e) for e in self.ended]
        return StepRecord(self.step, self.number, self.base, starts, ends)

    def _after(self, event: torch.cuda.Event) -> int:
        return round(self.origin.elapsed_time(event) * 1e6)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _resolve_at_exit(tracer: weakref.ref[Tracer]) -> None:
    alive = tracer()
    if alive is not None:
        alive.resolve_pending()
