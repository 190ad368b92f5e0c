"""The trace file of one rank: one JSON object a line, in the order of the events.

``run``   the run, rank and pipeline of the file; always the first line
``plan``  a plan, before the first step that executes it: its spec, this rank's program, and the certificate of all
``sync``  how far this rank's clock is ahead of the pipeline's first rank's, in nanoseconds
``step``  when each instruction of the program began and ended (the halves of a pair by themselves), in nanoseconds
          after ``base`` (a time of this clock)

A line is written whole, so that a run that was killed leaves a readable file.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_pp.errors import FileFormatError, InstructionError, PlanError, visible
from megatron_pp.plan.costs.files import read_text
from megatron_pp.plan.io.serialize import spec_from_values, spec_values
from megatron_pp.plan.ir.instruction import Instruction, each, format_program, unjoined
from megatron_pp.plan.ir.instruction_text import parse_program
from megatron_pp.plan.ir.placement import PLACEMENTS, Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec

RUN_RANDOM_BITS = 12
"""A run's name is hexadecimal: microseconds since 1970, then this number of random bits."""

_FORMAT = "megatron_pp.trace"
_VERSION = 2
_NOT_A_LINE = (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError)


@dataclass(frozen=True)
class RunHeader:
    run: str  # the same for all ranks of a job
    rank: int  # in its pipeline
    pipeline: tuple[int, ...]  # global ranks
    device: str
    host: str

    @property
    def file_name(self) -> str:
        return f"trace-{self.run}-rank{self.pipeline[self.rank]:05d}.jsonl"

    @property
    def started(self) -> datetime | None:
        """The beginning of the run in UTC, from the run's name. None if the name is not a time after 2000."""
        try:
            moment = datetime.fromtimestamp((int(self.run, 16) >> RUN_RANDOM_BITS) / 1e6, timezone.utc)
        except (ValueError, OverflowError, OSError):
            return None
        return moment if moment.year > 2000 else None


@dataclass(frozen=True)
class PlanRecord:
    spec: PlanSpec
    placement: str
    program: tuple[Instruction, ...]
    message_bytes: float  # size of an activation between stages; 0 if not known


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank: ``starts[i]`` and ``ends[i]`` of instruction i, nanoseconds after ``base``."""

    step: int
    plan: int
    base: int
    starts: Sequence[int]
    ends: Sequence[int]


@dataclass
class RankTrace:
    path: str
    header: RunHeader
    plans: list[PlanRecord] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)  # (this rank's time, how far it is ahead of rank 0's)
    steps: dict[int, StepRecord] = field(default_factory=dict)

    def ahead_at(self, time: int) -> float:
        """How far this rank's clock is ahead of the first rank's, interpolated between two clock comparisons."""
        if not self.syncs:
            return 0.0
        before = [s for s in self.syncs if s[0] <= time] or self.syncs[:1]
        after = [s for s in self.syncs if s[0] > time]
        (t0, a0), (t1, a1) = (before[-1], after[0]) if after else (self.syncs[-2:][0], self.syncs[-1])
        return a0 + (a1 - a0) * (time - t0) / (t1 - t0) if t1 != t0 else float(a0)


def header_line(header: RunHeader) -> str:
    return _line("run", format=_FORMAT, version=_VERSION, **asdict(header))


def plan_line(plan: Plan, rank: int, message_bytes: float) -> str:
    spec = spec_values(plan.spec)
    program = format_program(plan.programs[rank])
    of_plan = {"spec": spec, "placement": plan.placement.kind, "program": program, "message_bytes": message_bytes}
    if plan.certificate is not None:
        of_plan["certificate"] = plan.certificate.to_dict()
    return _line("plan", **of_plan)


def sync_line(time: int, ahead: int) -> str:
    return _line("sync", time=time, ahead=ahead)


def step_line(step: StepRecord) -> str:
    return _line("step", **{**vars(step), "starts": list(step.starts), "ends": list(step.ends)})


def _line(kind: str, **content: Any) -> str:
    return json.dumps({"kind": kind, **content}, separators=(",", ":")) + "\n"


def read_rank_trace(path: str | Path) -> RankTrace:
    """Read one rank's file. Raises FileFormatError with the file, the line and the fault in it.

    A last line without its end, as a killed run leaves it, is ignored."""
    return parse_rank_trace(read_text(path, plain=True), path)


def parse_rank_trace(text: str, path: str | Path) -> RankTrace:
    """Parse the text of a file as ``read_rank_trace`` does. ``path`` names the file in errors."""
    lines = text.split("\n")
    if not lines[0]:
        raise FileFormatError(f"{path}: the file is empty")
    trace: RankTrace | None = None
    for number, line in enumerate(lines[:-1], start=1):
        try:
            content = json.loads(line)
            if trace is None:
                trace = RankTrace(str(path), _header(content))
            else:
                _add(trace, content)
        except (PlanError, InstructionError) as error:
            raise FileFormatError(f"{path}, line {number}: {error}") from error
        except _NOT_A_LINE as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else f"{type(error).__name__}: {error}"
            raise FileFormatError(f"{path}, line {number}: not a line of a trace ({why})") from error
    if trace is None:
        raise FileFormatError(f"{path}: the file is cut off in its first line")
    return trace


def _header(content: dict[str, Any]) -> RunHeader:
    version = content.get("version")
    if content.get("format") != _FORMAT or type(version) is not int or version != _VERSION:
        raise FileFormatError(f"no trace of format {_FORMAT}, version {_VERSION}")
    run, device, host = (visible(str(content[name])) for name in ("run", "device", "host"))
    rank = int(content["rank"])
    pipeline = tuple(map(int, content["pipeline"]))
    if not 0 <= rank < len(pipeline):
        raise FileFormatError(f"rank {rank} is not in a pipeline of {len(pipeline)} ranks")
    return RunHeader(run, rank, pipeline, device, host)


def _add(trace: RankTrace, content: dict[str, Any]) -> None:
    kind = content["kind"]
    if kind == "plan":
        if content["placement"] not in PLACEMENTS:
            raise FileFormatError(f"placement {content['placement']!r} is not known")
        spec = spec_from_values(dict(content["spec"]))
        read = parse_program(content["program"])
        _check_plan(trace.header, spec, read)
        placement = Placement(content["placement"], spec.pipeline_size, spec.num_chunks)
        program = placement.place(trace.header.rank, read)
        trace.plans.append(PlanRecord(spec, content["placement"], program, float(content["message_bytes"])))
    elif kind == "sync":
        time, ahead = _whole_numbers(content, "time", "ahead")
        trace.syncs.append((time, ahead))
    elif kind == "step":
        step, plan, base = _whole_numbers(content, "step", "plan", "base")
        record = StepRecord(step, plan, base, array("q", content["starts"]), array("q", content["ends"]))
        _check_step(trace, record)
        trace.steps[record.step] = record
    else:
        raise FileFormatError(f"{kind!r} is no kind of line")


def _whole_numbers(content: dict[str, Any], *names: str) -> array[int]:
    """The integers of these names, of 64 bits, as nanoseconds are. Raises OverflowError."""
    return array("q", (int(content[name]) for name in names))


def _check_plan(header: RunHeader, spec: PlanSpec, program: Sequence[Instruction]) -> None:
    if spec.pipeline_size != len(header.pipeline):
        raise FileFormatError(f"a plan for {spec.pipeline_size} ranks in a run of {len(header.pipeline)}")
    sizes = f"{spec.num_chunks} chunks of {spec.num_microbatches} microbatches in {spec.num_parts} slices"
    if spec.num_chunks * spec.num_microbatches * spec.num_parts > len(program):
        raise FileFormatError(f"{sizes} do not fit into the program")
    for at in each(program):
        if at.chunk >= spec.num_chunks or at.mb >= spec.num_microbatches or at.part >= spec.num_parts:
            raise FileFormatError(f"{at} is outside {sizes}")


def _check_step(trace: RankTrace, record: StepRecord) -> None:
    if not 0 <= record.plan < len(trace.plans):
        raise FileFormatError(f"step {record.step} is of a plan that does not precede it")
    expected = sum(1 for _ in unjoined(trace.plans[record.plan].program))
    if not len(record.starts) == len(record.ends) == expected:
        raise FileFormatError(
            f"step {record.step} has {len(record.starts)} starts and {len(record.ends)} ends of {expected} instructions"
        )
