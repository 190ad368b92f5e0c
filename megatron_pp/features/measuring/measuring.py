"""Measures the costs of a pipeline's stages, links and copies in the first steps of a run (``config.measure``).

The first training step is left out. In the next steps every compute operation is timed as in a trace, and in the first
of these KeptBytes counts two microbatches of each stage. After the last of these steps, between two steps, all ranks of
the pipeline time their links and gather the results. The job's first rank writes the results of its pipeline as JSON
(``plan.costs.measured.MeasuredFile``). ``auto`` reads the file as ``pipeline_measured``, ``megatron-pp advise`` by
``--costs``.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import statistics
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_pp.comm.link_timing import copy_rates, gather_numbers, measure_links, sizes_around
from megatron_pp.comm.transport import Transport
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.errors import FileFormatError, ScheduleInputError
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.files import why_unwritable, write_whole
from megatron_pp.plan.costs.measured import (
    CopyRates,
    Measured,
    MeasuredFile,
    MeasuredStep,
    TransferTimes,
    Units,
    fitted_link,
)
from megatron_pp.plan.costs.stage_costs import Link, StageCosts
from megatron_pp.plan.ir.instruction import WEIGHT_GRAD
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.footprint import KeptBytes
from megatron_pp.tracing.analysis import TIMED, StageTimes, stage_costs
from megatron_pp.tracing.files import StepRecord
from megatron_pp.tracing.observers import Observer
from megatron_pp.tracing.recorder import Keeper
from megatron_pp.tracing.step_observer import StepObserver

logger = logging.getLogger("megatron_pp")

FILE_NAME = "megatron_pp_measured.json"
_NOT_MEASURED = math.nan  # stands for a missing number among those that are gathered

# Each belongs to a model and is dropped with it, as tracers are.
_MEASURINGS: ObjectTable[Measuring] = ObjectTable()


def step_observer(step: Any) -> Measuring | None:
    """The observer that measures the steps of a step's model; None if nothing is left to measure. Raises
    ScheduleInputError if the file cannot be written."""
    model = step.inputs.chunks[0]
    settings = step.settings
    if step.inputs.forward_only:
        return None
    found = _MEASURINGS.get(model)
    if found is None:
        path = settings.measure_out or os.path.join(settings.trace_dir or "", FILE_NAME)
        _check_path(path)
        found = _MEASURINGS[model] = Measuring(settings.measure, path)
    return None if found.progress.over else found


def _check_path(path: str) -> None:
    with suppress(OSError, ValueError):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    why = why_unwritable(path)
    if why:
        raise ScheduleInputError(
            f"config.measure_out is {path!r}, which cannot be written ({why}); name a file in a folder that can be"
        )


class TimeKeeper(Keeper):
    """Collects the times of steps, in seconds, while training goes on. The times of all ranks can be gathered after any
    step."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.times = StageTimes()
        self.counting: KeptBytes | None = None  # counts in the step that is recorded now

    def keep(self, plan: Plan, record: StepRecord) -> None:
        """Keep the times of a step. A slice of a sequence counts as its share of the whole."""
        scale = 1e-9 * plan.spec.num_parts
        counting = self.counting
        starts, ends = ([scale * time for time in times] for times in (record.starts, record.ends))
        disturbed = None if counting is None else counting.hooked
        self.times.add(plan.timed(self.rank), starts, ends, disturbed)
        self.counting = None

    def gathered(self, placement: Placement) -> tuple[StageCosts, bool]:
        """The median costs of every stage, and whether all of them split their backward. Collective over the pipeline,
        between two steps."""
        self.resolve_pending()
        medians = self.times.medians()
        stages = placement.stages[self.transport.rank]
        mine = {stage: [medians.get((op, stage), _NOT_MEASURED) for op in TIMED] for stage in stages}
        rows = gather_by_stage(self.transport, placement, mine)
        known = {
            (op, stage): time
            for stage, row in enumerate(rows)
            for op, time in zip(TIMED, row, strict=True)
            if not math.isnan(time)
        }
        return stage_costs(known, placement.num_stages), all(
            (WEIGHT_GRAD, stage) in known for stage in range(placement.num_stages)
        )


def gather_by_stage(
    transport: Transport, placement: Placement, mine: Mapping[int, Sequence[float]]
) -> list[list[float]]:
    """The rows of numbers of all stages, from those of this rank's stages. All rows have one length. Collective."""
    numbers = [number for stage in placement.stages[transport.rank] for number in mine[stage]]
    width = len(numbers) // placement.num_chunks
    rows: dict[int, list[float]] = {}
    for rank, found in enumerate(gather_numbers(transport, numbers)):
        for chunk, stage in enumerate(placement.stages[rank]):
            rows[stage] = found[chunk * width : (chunk + 1) * width]
    return [rows[stage] for stage in range(placement.num_stages)]


@dataclass
class _Progress:
    """The progress of the measurement. At the end of the program it logs if the run was too short."""

    steps: int
    measured: int = 0
    over: bool = False
    process: int = field(default_factory=os.getpid)  # processes that are forked from it log nothing

    def at_exit(self) -> None:
        if not self.over and self.process == os.getpid():
            logger.warning(
                "the run ended after %d of the %d steps of config.measure, and nothing was written: it takes one "
                "training step more than that",
                *(self.measured, self.steps),
            )


class Measuring(StepObserver):
    """Measures one model on one rank."""

    def __init__(self, steps: int, path: str) -> None:
        self.path = path
        self.progress = _Progress(steps)
        self.keeper: TimeKeeper | None = None  # None before the first step
        self.counted: KeptBytes | None = None

    def observers(self, step: Any, plan: Plan, size: float) -> Sequence[Observer]:
        """The observers of a step; none for the first step."""
        transport = step.communicator.transport
        if self.keeper is None:
            self.keeper = TimeKeeper(transport)
            if _writes(transport):
                atexit.register(self.progress.at_exit)
            return []
        self.keeper.follow(transport)
        recording = self.keeper.recording(plan, self.progress.measured + 1)
        if self.counted is not None:
            return [recording]
        self.counted = self.keeper.counting = KeptBytes(plan, transport.rank, step.inputs.chunks, step.weights)
        return [recording, self.counted]

    def watch(self, engine: PlanExecutor) -> None:
        if self.counted is not None:
            self.counted.engine = weakref.proxy(engine)  # weak, because it stays here after a step that fails

    def after_step(self, step: Any, plan: Plan, guard: Any) -> None:
        """Called after the last measured step: times links, gathers and writes. Collective over the pipeline."""
        if guard is not None:
            guard.phase("measuring what transfers take (config.measure)")
        if self.counted is None or self.keeper is None:
            return
        self.counted.engine = None
        self.progress.measured += 1
        if self.progress.measured < self.progress.steps:
            return
        transport = self.keeper.transport
        placement = plan.placement
        costs, split = self.keeper.gathered(placement)
        counts = (self.counted.forward, self.counted.weight, self.counted.received)
        mine = {
            stage: [counted.get(stage, _NOT_MEASURED) for counted in counts]
            for stage in placement.stages[transport.rank]
        }
        kept, left, received = zip(*gather_by_stage(transport, placement, mine), strict=True)
        message = max((size for size in received if not math.isnan(size)), default=0.0)
        network = None
        if transport.size > 1 and message > 0:
            network = network_times(transport, placement, message)
        copies = _copies(transport)
        self.progress.over = True
        self.keeper = self.counted = None
        atexit.unregister(self.progress.at_exit)
        if _writes(transport):
            values = Measured(
                costs.forward,
                costs.backward_input,
                costs.weight,
                costs.backward,
                transfer=0.0 if network is None else dict(network.transfers)[message],
                **_if_known("activation", kept),
                **_if_known("weight_activation", left),
            )
            if transport.device.type == "cuda" and isinstance(values.activation, tuple):
                slower = min(copies.to_host, copies.to_device)
                values = replace(values, **known_costs(offload=tuple(size / slower for size in values.activation)))
            run = _run_of(step, self.progress.steps, transport.device.type, split)
            self._write(MeasuredFile(values, Units("s", "bytes"), network, copies, run), placement.num_stages)

    def _write(self, file: MeasuredFile, stages: int) -> None:
        try:
            write_whole(self.path, json.dumps(file.to_dict(), indent=1) + "\n")
        except FileFormatError as error:
            logger.warning("the measurements of config.measure are lost: %s", error)
            return
        counted = isinstance(file.values.activation, tuple)
        memory = "memory" if counted else "no memory, as stages that offload all forwards were not counted"
        logger.warning(
            "measured over %s: times of %s, transfers, copies, and %s, are in %s; give it to "
            "megatron-pp advise --costs, or, with a memory_limit added, as pipeline_measured to pipeline_schedule auto",
            *(_counted(self.progress.steps, "step"), _counted(stages, "stage"), memory, self.path),
        )


def _run_of(step: Any, steps: int, device: str, split: bool) -> MeasuredStep:
    spec = step.spec
    inputs = step.inputs
    sizes = spec.pipeline_size, spec.num_chunks, spec.num_microbatches, inputs.micro_batch_size, inputs.seq_length
    return MeasuredStep(steps, spec.schedule, *sizes, device, split)


def network_times(transport: Transport, placement: Placement, message: float) -> TransferTimes:
    """Seconds of transfers of sizes around ``message`` bytes, on all links of the pipeline. Collective over it, between
    two steps."""
    edges = placement.rank_edges
    sizes = sizes_around(message)
    mine = measure_links(transport, edges, sizes)
    numbers = [time for edge in edges for time in mine.get(edge, [_NOT_MEASURED] * len(sizes))]
    of_ranks = gather_numbers(transport, numbers)
    rows = {}
    for at, (source, target) in enumerate(edges):
        rows[source, target] = of_ranks[source][at * len(sizes) : (at + 1) * len(sizes)]
    usual = [statistics.median(times) for times in zip(*rows.values(), strict=True)]
    links = [(*edge, *_link_values(fitted_link(list(zip(sizes, times, strict=True))))) for edge, times in rows.items()]
    whole = _link_values(fitted_link(list(zip(sizes, usual, strict=True))))
    return TransferTimes(message, *whole, tuple(zip(sizes, usual, strict=True)), tuple(links))


def _link_values(link: Link) -> tuple[float, float | None]:
    return link.latency, link.bandwidth if math.isfinite(link.bandwidth) else None


def _copies(transport: Transport) -> CopyRates:
    """The rates of copies, as the median over the pipeline's ranks. Collective."""
    between, *mine = copy_rates(transport.device)
    out, back = (statistics.median(rates) for rates in zip(*gather_numbers(transport, mine), strict=True))
    return CopyRates(between, out, back)


def _if_known(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {} if any(map(math.isnan, values)) else {name: tuple(map(int, values))}


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _writes(transport: Transport) -> bool:
    """Whether this rank writes the file: it is the job's first rank."""
    return transport.global_rank(transport.rank) == 0
