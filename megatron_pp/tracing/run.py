"""Merges the files of one run's ranks, so that every step of a pipeline is on one clock."""

from __future__ import annotations

import os
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_pp.errors import FileFormatError
from megatron_pp.plan.io.serialize import ComputeOf
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import MOVES, Message, message_of, neighbour_of
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.simulate.simulation import Simulation, Transfer, TransferLog, Waits
from megatron_pp.tracing.files import RankTrace, read_rank_trace

_NANOSECONDS = 1e6  # in a millisecond


@dataclass(frozen=True)
class TracedRun:
    """One pipeline's traces in the order of its ranks, and the training steps that all of them recorded. All times in
    milliseconds."""

    ranks: tuple[RankTrace, ...]
    steps: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.ranks[0].header.run

    def plan(self, step: int) -> Plan:
        """The plan that ``step`` executed. Raises FileFormatError if the ranks disagree."""
        records = [trace.plans[trace.steps[step].plan] for trace in self.ranks]
        first = records[0]
        # Each rank decides for itself whether it splits backwards.
        spec = replace(first.spec, split_backward=any(record.spec.split_backward for record in records))
        for rank, record in enumerate(records):
            if replace(record.spec, split_backward=spec.split_backward) != spec or record.placement != first.placement:
                other = record.spec.describe()
                raise FileFormatError(f"step {step}: rank {rank} ran another plan than rank 0: {other}")
        placement = Placement(first.placement, first.spec.pipeline_size, first.spec.num_chunks)
        programs = tuple(record.program for record in records)
        return Plan(spec, placement, programs, ComputeOf(programs))

    def began(self, step: int) -> float:
        """The time at which ``step`` began, relative to the first recorded step."""
        return (_beginning(self, step) - _beginning(self, self.steps[0])) / _NANOSECONDS

    def measured(self, step: int) -> Simulation:
        """The step as it happened, from its first instruction on any rank. If nothing makes the ranks meet between two
        steps, a rank may wait in this step while others still compute in the step before. It counts as idle in that
        step, not in this one."""
        return _Merge(self, step).simulation()


def load_run(folder: str | Path, run: str | None = None, rank: int = 0) -> TracedRun:
    """The pipeline of global rank ``rank`` in run ``run`` (needed only if the folder holds several). Raises
    FileFormatError: no traces, several runs, a missing rank, unreadable files, no step that all ranks recorded."""
    runs = run_names(folder)
    if not runs:
        raise FileFormatError(f"{folder}: {_why_none(Path(folder))}")
    if run is None and len(runs) > 1:
        names = ", ".join(runs)
        raise FileFormatError(f"{folder}: there are traces of {len(runs)} runs: {names}; choose one with --run")
    if run is not None and run not in runs:
        raise FileFormatError(f"{folder}: there is no run {run!r}; there are {', '.join(runs)}")
    paths = sorted(Path(folder).glob(f"trace-{run or runs[0]}-rank*.jsonl"))
    traces = [read_rank_trace(path) for path in paths]
    for trace in traces:
        if trace.header.run not in Path(trace.path).name:
            raise FileFormatError(f"{trace.path}: this is a trace of run {trace.header.run}, under another one's name")
    return pipeline_of(traces, rank, str(folder))


def run_names(folder: str | Path) -> list[str]:
    """The runs whose traces are in ``folder``, oldest first."""
    return sorted({path.name.split("-")[1] for path in Path(folder).glob("trace-*-rank*.jsonl")})


def _why_none(folder: Path) -> str:
    """The reason why no traces were found in this folder."""
    try:
        os.listdir(folder)
    except FileNotFoundError:
        return "the folder does not exist, so there are no traces"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "there are no traces (files named trace-RUN-rankN.jsonl)"


def pipeline_of(traces: Sequence[RankTrace], rank: int, folder: str) -> TracedRun:
    """The pipeline of global rank ``rank``, of traces of one run; ``folder`` names their place in errors."""
    by_rank = {trace.header.pipeline[trace.header.rank]: trace for trace in traces}
    member = by_rank.get(rank) or next((t for t in traces if rank in t.header.pipeline), None)
    if member is None:
        known = ", ".join(map(str, sorted(by_rank)))
        raise FileFormatError(f"{folder}: there is no trace of global rank {rank}; there are traces of {known}")
    missing = [r for r in member.header.pipeline if r not in by_rank]
    if missing:
        name = member.header.file_name.rsplit("-rank", 1)[0]
        file = f"{name}-rank{missing[0]:05d}.jsonl"
        raise FileFormatError(f"{folder}: the trace of rank {missing[0]} is missing ({file})")
    ranks = tuple(by_rank[r] for r in member.header.pipeline)
    strange = next((t for t in ranks if t.header.pipeline != member.header.pipeline), None)
    if strange is not None:
        theirs = strange.header.pipeline
        ours = member.header.pipeline
        raise FileFormatError(f"{strange.path}: its pipeline is {theirs}, not {ours}")
    common = set.intersection(*(set(trace.steps) for trace in ranks))
    if not common:
        raise FileFormatError(f"{folder}: there is no step that all {len(ranks)} ranks recorded")
    return TracedRun(ranks, tuple(sorted(common)))


class _Merge:
    """One step of all ranks on the first rank's clock."""

    def __init__(self, run: TracedRun, step: int) -> None:
        self.plan = run.plan(step)
        first = run.ranks[0]
        self.size = first.plans[first.steps[step].plan].message_bytes
        zero = _beginning(run, step)
        self.starts = []
        self.ends = []
        for trace, base in zip(run.ranks, _bases(run, step), strict=True):
            self.starts.append(_milliseconds(trace.steps[step].starts, base - zero))
            self.ends.append(_milliseconds(trace.steps[step].ends, base - zero))
        # Of messages that were received: their link, and start and end of the WAIT.
        self.waited: dict[Message, tuple[tuple[int, int], float, float]] = {}
        self.posted: dict[tuple[str, Message], float] = {}  # ("S" or "R", message) -> when
        self.batches: dict[tuple[int, Message], list[Message]] = {}  # (rank, message) -> all that its BATCH posted
        self._collect()

    def simulation(self) -> Simulation:
        transfers = self._transfers()
        log = TransferLog()
        for transfer in sorted(transfers.values(), key=lambda transfer: transfer.start):
            log.append(transfer)
        ranks = range(len(self.starts))
        waits = tuple(self._waits(r, transfers) for r in ranks)
        busy = tuple(sum(end - start for at, start, end in self._timed(r) if at.op in ins.COMPUTE_OPS) for r in ranks)
        return Simulation(self.plan, self.starts, self.ends, log, waits, busy)

    def _timed(self, rank: int) -> Iterator[tuple[ins.Instruction, float, float]]:
        return zip(self.plan.timed(rank), self.starts[rank], self.ends[rank], strict=True)

    def _collect(self) -> None:
        late = self.plan.spec.variable_shapes
        for rank in range(len(self.plan.programs)):
            for at, start, end in self._timed(rank):
                together = [message_of(one) for one in at.members]
                self.batches.update(((rank, message), together) for message in together)
                for one in ins.each([at]):
                    if one.op in ins.SEND_OPS:
                        self.posted[("S", message_of(one))] = start
                    elif one.op in ins.RECV_OPS and not (late and one is at):
                        self.posted[("R", message_of(one))] = start
                    elif one.op in ins.WAIT_OPS:
                        link = (self._source(message_of(one)), rank)
                        self.waited[message_of(one)] = (link, start, end)
                        self.posted.setdefault(("R", message_of(one)), start)

    def _transfers(self) -> dict[Message, Transfer]:
        """The transfers of the step. A transfer begins when both ends are posted. If the receiver waited for it, it
        ends with that WAIT. Otherwise it ended before the WAIT: it then takes the usual time of its link, and ends at
        the WAIT at the latest."""
        ready = {m: max(self.posted[("S", m)], self.posted[("R", m)]) for m in self.waited if ("S", m) in self.posted}
        usual = self._usual_times(ready)
        transfers = {}
        for message, since in ready.items():
            link, wait_start, wait_end = self.waited[message]
            held_up = since > wait_start and self._completes_batch(message, ready)
            end = wait_end if held_up else min(wait_end, since + usual.get(link, 0.0))
            times = (self.posted[("S", message)], self.posted[("R", message)], since, since, max(since, end))
            kind, stage, mb, part, _ = message
            transfers[message] = Transfer(*link, kind, stage, mb, self.size, *times, part)
        return transfers

    def _usual_times(self, ready: dict[Message, float]) -> dict[tuple[int, int], float]:
        """The usual time of a transfer on each link: the median of the transfers for which a rank waited from beginning
        to end. If a link has no such transfer, it is the shortest upper bound."""
        seen: dict[tuple[int, int], list[float]] = defaultdict(list)
        bounds: dict[tuple[int, int], list[float]] = defaultdict(list)
        for message, since in ready.items():
            link, wait_start, wait_end = self.waited[message]
            held_up = since >= wait_start and self._completes_batch(message, ready)
            (seen if held_up else bounds)[link].append(wait_end - since)
        shortest = {link: min(times) for link, times in bounds.items()}
        return shortest | {link: statistics.median(times) for link, times in seen.items()}

    def _completes_batch(self, message: Message, ready: dict[Message, float]) -> bool:
        """Whether the message was the last to become ready among those that its receiver posted together. A batch
        completes as a whole, so only the last message shows its time."""
        together = self.batches.get((self.waited[message][0][1], message), (message,))
        return ready[message] == max(ready.get(m, 0.0) for m in together)

    def _source(self, message: Message) -> int:
        return self.plan.placement.homes[neighbour_of(MOVES[message.kind].recv, message.stage)][0]

    def _waits(self, rank: int, transfers: dict[Message, Transfer]) -> Waits:
        waits = Waits()
        for at, start, end in self._timed(rank):
            if at.op in ins.FREE_OPS:
                waits.release += end - start
            elif at.op in ins.WAIT_OPS:
                message = message_of(at)
                together = [transfers[m] for m in self.batches.get((rank, message), (message,)) if m in transfers]
                if together:
                    waits.add_receive(start, end, max(together, key=lambda t: t.ready))
        return waits


def _bases(run: TracedRun, step: int) -> list[float]:
    """The base of each rank's times in ``step``, in nanoseconds of the first rank's clock."""
    return [trace.steps[step].base - trace.ahead_at(trace.steps[step].base) for trace in run.ranks]


def _beginning(run: TracedRun, step: int) -> float:
    """The time at which the first instruction of any rank began. If a rank was then still in the step before, it is the
    end of that step, or the first compute of this step if that began earlier."""
    bases = _bases(run, step)
    traced = [trace.steps[step] for trace in run.ranks]
    first = min(base + times.starts[0] for base, times in zip(bases, traced, strict=True) if len(times.starts))
    before = _end(run, step - 1) if step - 1 in run.steps else first
    if before <= first:
        return first
    plan = run.plan(step)
    for rank, (base, times) in enumerate(zip(bases, traced, strict=True)):
        timed = zip(plan.timed(rank), times.starts, strict=True)
        before = min(before, next((base + start for at, start in timed if at.op in ins.COMPUTE_OPS), before))
    return before


def _end(run: TracedRun, step: int) -> float:
    traced = zip(_bases(run, step), (trace.steps[step].ends for trace in run.ranks), strict=True)
    return max(base + ends[-1] for base, ends in traced if len(ends))


def _milliseconds(times: Sequence[int], shift: float) -> array[float]:
    return array("d", (max(0.0, (t + shift) / _NANOSECONDS) for t in times))
