"""The data of every drawing: blocks, waits, transfers and memory of each rank, simulated or recorded.

Blocks thinner than a pixel are added up per pixel. If a memory curve has too many steps, they are thinned.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

from megatron_pp.plan.costs.activations import activations_timeline
from megatron_pp.plan.ir.feature import known_settings
from megatron_pp.plan.ir.instruction import (
    BACKWARD,
    COMPUTE_OPS,
    COPIES_FROM_HOST,
    COPIES_TO_HOST,
    COPY_OF,
    GATHERS,
    POST_OF,
    SCATTERS,
)
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.memory import ModelShape, rank_memory
from megatron_pp.plan.simulate.simulation import Event, Simulation, Transfer
from megatron_pp.tools.draw.palette import OPERATIONS

COPIES = (COPIES_TO_HOST, COPIES_FROM_HOST)
COLLECTIVES = (GATHERS, SCATTERS)
STRIPS = COPIES, COLLECTIVES
"""The kinds of events that are drawn as pairs of thin bars below a rank's blocks."""


@dataclass
class Lane:
    """The events and the memory of one rank.

    compute  forwards, backwards and weight gradients, in order of time, without overlap
    waits    WAIT and FREE instructions that took time
    copies   copies between device and host, and collectives of replicas, that took time; each has the instruction that
             posted it
    memory   (time, value) steps: a value holds from its time to the time of the next step; Timeline says what it counts
    """

    name: str
    compute: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    copies: list[Event] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    def copied(self, ops: frozenset[str]) -> list[Event]:
        """The copies or collectives whose operation is in ``ops``."""
        return [copy for copy in self.copies if copy.instruction.op in ops]

    @property
    def busy(self) -> float:
        return sum(e.end - e.start for e in self.compute)

    @property
    def peak(self) -> float:
        return max((value for _, value in self.memory), default=0.0)


class Traffic(NamedTuple):
    """The number of messages, the sum of their bytes, and the durations of the shortest and the longest."""

    messages: int
    size: float
    shortest: float
    longest: float


@dataclass
class Timeline:
    """All ranks of one step. Times are in ``unit`` and begin at 0. ``stages[rank][chunk]`` is a global stage.

    Memory is either all memory of a rank, in bytes, or the activations that it keeps, in microbatches. A rank that has
    run all its chunks forward and none backward for one microbatch keeps 1. ``note`` says if another order replaces the
    schedule's own. ``slices`` is the number of slices that a sequence is cut into.
    """

    title: str
    unit: str
    lanes: list[Lane]
    stages: Sequence[Sequence[int]]
    transfers: Iterable[Transfer] = ()
    num_microbatches: int = 1
    memory_in_bytes: bool = False
    note: str = ""
    slices: int = 1

    @property
    def num_chunks(self) -> int:
        return len(self.stages[0])

    @property
    def end(self) -> float:
        """The end of the last block or wait."""
        ends = [events[-1].end for lane in self.lanes for events in (lane.compute, lane.waits) if events]
        return max(ends, default=0.0)

    @property
    def bubble_share(self) -> float:
        whole = self.end * len(self.lanes)
        return 1.0 - sum(lane.busy for lane in self.lanes) / whole if whole else 0.0

    @cached_property
    def short_block(self) -> float:
        """The block length that nine of ten blocks reach. Labels must fit into it."""
        lengths = sorted(e.end - e.start for lane in self.lanes for e in lane.compute)
        return lengths[len(lengths) // 10] if lengths else 0.0

    @cached_property
    def ops(self) -> list[str]:
        """The compute operations that occur, in the order of OPERATIONS."""
        found = {e.instruction.op for lane in self.lanes for e in lane.compute}
        return [op for op in OPERATIONS if op in found]

    @property
    def has_waits(self) -> bool:
        return any(lane.waits for lane in self.lanes)

    @cached_property
    def traffic(self) -> Traffic:
        """All transfers in numbers."""
        messages = 0
        size = 0.0
        shortest = math.inf
        longest = 0.0
        for transfer in self.transfers:
            messages += 1
            size += transfer.size
            shortest = min(shortest, transfer.end - transfer.start)
            longest = max(longest, transfer.end - transfer.start)
        return Traffic(messages, size, shortest, longest)

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer takes time."""
        return self.traffic.longest > 0

    def has_copies(self, *kinds: frozenset[str]) -> bool:
        """Whether a copy or collective of one of these ``kinds`` takes time."""
        return any(lane.copied(ops) for lane in self.lanes for ops in kinds)

    def strips(self) -> list[list[Sequence[Event] | Sequence[Transfer]]]:
        """For each rank, the events that are drawn as thin bars below its blocks.

        They are the activations and gradients that it sends, its copies to the host and back, and its all-gathers and
        reduce-scatters. A kind of which this timeline has no event is left out.
        """
        found: list[list[Sequence[Event] | Sequence[Transfer]]] = []
        for lane, sent in zip(self.lanes, self.sent(), strict=True):
            found.append([*sent] if self.has_transfers else [])
            for kinds in STRIPS:
                found[-1] += [lane.copied(ops) for ops in kinds] if self.has_copies(*kinds) else []
        return found

    @property
    def most_memory(self) -> float:
        """The highest memory of any rank. An evaluation keeps nothing and has 0."""
        return max((lane.peak for lane in self.lanes), default=0.0)

    def sent(self) -> list[tuple[list[Transfer], list[Transfer]]]:
        """For each rank, the activations and the gradients that it sends, in order of time. Transfers that take no time
        are left out."""
        sent: list[tuple[list[Transfer], list[Transfer]]] = [([], []) for _ in self.lanes]
        for transfer in sorted(self.transfers, key=lambda transfer: transfer.start):
            if transfer.end > transfer.start:
                sent[transfer.source][transfer.kind == BACKWARD].append(transfer)
        return sent


def simulated_timeline(
    simulation: Simulation, unit: str = "slots", shape: ModelShape | None = None, title: str | None = None
) -> Timeline:
    """The timeline of a simulated or recorded step. The memory of each rank is in bytes if ``shape`` is given,
    otherwise in microbatches."""
    plan = simulation.plan
    spec = simulation.plan.spec
    lanes = []
    for rank in range(len(plan.programs)):
        lane = Lane(f"rank {rank}")
        for event in simulation.events(rank):
            op = event.instruction.op
            if op in COMPUTE_OPS:
                lane.compute.append(event)
            elif (op in POST_OF or op in COPY_OF) and event.end > event.start:
                lane.waits.append(event)
        lane.copies = [copy for copy in simulation.copies[rank] if copy.end > copy.start] if simulation.copies else []
        if shape is not None:
            memory = rank_memory(plan, rank, shape)
            lane.memory = _steps(simulation.ends[rank], memory.after, memory.static)
        else:
            kept = (value / spec.num_chunks for value in activations_timeline(plan, rank))
            lane.memory = _steps(simulation.ends[rank], kept, 0.0)
        lanes.append(lane)
    sizes = simulation.transfers, spec.num_microbatches, shape is not None, plan.remark, spec.num_parts
    return Timeline(title or short_title(spec), unit, lanes, plan.placement.stages, *sizes)


def short_title(spec: PlanSpec) -> str:
    """``zb_v P=4 V=2 M=8``, followed by the settings that differ from the defaults."""
    sizes = spec.pipeline_size, spec.num_chunks, spec.num_microbatches
    usual = PlanSpec(spec.schedule, *sizes, **known_settings(slices=spec.num_parts))
    extra = [f"slices={spec.num_parts}"] if spec.num_parts > 1 else []
    extra += [f"group={spec.group_size}"] if spec.effective_group_size != usual.effective_group_size else []
    extra += [f"{value}" for value in (spec.policy, spec.channels) if value not in (usual.policy, usual.channels)]
    added = dict(spec.added)
    extra += [f"offload={added['offload_chunks']}"] if "offload_chunks" in added else []
    extra += [f"fsdp={added['fsdp_collectives']}"] if "fsdp_collectives" in added else []
    extra += ["forward only"] if spec.forward_only else []
    return " ".join([spec.schedule, f"P={sizes[0]} V={sizes[1]} M={sizes[2]}", *extra])


def _steps(times: Sequence[float], values: Iterable[float], static: float) -> list[tuple[float, float]]:
    """The (time, value) steps at which the value changes. If several values have the same time, the highest and the
    last are kept."""
    changes = chain([(0.0, 0.0)], zip(times, values, strict=True))
    steps: list[tuple[float, float]] = []
    for time, members in groupby(changes, key=itemgetter(0)):
        found = [static + value for _, value in members]
        for value in (max(found), found[-1]):
            if not steps or steps[-1][1] != value:
                steps.append((time, value))
    return steps


class Piece(NamedTuple):
    """One block from ``left`` to ``right`` in pixels, or one pixel with the shares of the operations in it."""

    left: float
    right: float
    event: Event | None
    shares: tuple[tuple[str, float], ...] = ()


def pieces(events: Sequence[Event], pixels_per_unit: float) -> Iterator[Piece]:
    """A piece for each block of at least a pixel. Thinner blocks become one piece per pixel, with the share of each
    operation."""
    blocks = ((e, e.start * pixels_per_unit, e.end * pixels_per_unit) for e in events)
    for pixel, group in groupby(blocks, lambda block: int(block[1]) if block[2] - block[1] < 1.0 else None):
        if pixel is None:
            yield from (Piece(left, right, event) for event, left, right in group)
            continue
        shares: defaultdict[str, float] = defaultdict(float)
        for event, left, right in group:
            shares[event.instruction.op] = shares[event.instruction.op] + right - left
        yield Piece(pixel, pixel + 1, None, tuple(shares.items()))


def thinned(steps: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about ``most`` of the steps: the highest and the last step of each interval of time."""
    if len(steps) <= most:
        return list(steps)
    stretch = steps[-1][0] / (most / 2) or 1.0
    kept: list[tuple[float, float]] = []
    for _, members in groupby(steps, key=lambda step: int(step[0] / stretch)):
        group = list(members)
        highest = max(group, key=lambda step: step[1])
        kept += [highest] if highest is group[-1] else [highest, group[-1]]
    return kept
