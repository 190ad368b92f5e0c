"""What a memory limit adds to a step's lower bound: forwards that wait for backwards, and areas of memory and time.

Areas are counted by dual feasible functions (Fekete and Schepers 2001, "New classes of fast lower bounds for bin
packing"): whatever fits under the limit together has values of at most 1 together. Halves of a rank's memory that two
microbatches fill do so by their sizes, and so do two whole ones that leave a third of it unused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs import MemoryModel, StageCosts
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.sim.bound_paths import Paths, StageTimes, Wait
from megatron_pp.plan.sim.greedy import ROUNDING

_PARTS = range(1, 9)  # dual feasible functions that are tried, besides those of the memory's own sizes
_CLOSE = 1e-6
Event = tuple[float, int]  # from that time on, more of the memory can be in use
Ramp = tuple[Sequence[Event], Sequence[float]]  # how much more, for each kind of event


def waits_of(placement: Placement, memory: MemoryModel, times: StageTimes) -> tuple[Wait, ...]:
    """What forwards of each stage wait for. Raises PlanError where one microbatch alone exceeds the limit.

    Of n microbatches between their forward of a stage and their backward of ``until``, the same stage or a later one of
    the rank, the first to run that backward keeps all chunks up to ``until`` and the others at least those up to
    ``stage``. Of n between their forward and the end of their W, the last keeps its activations when its forward
    starts, and the others those or what waits for W.
    """
    waits: list[Wait] = []
    for rank, stages in enumerate(placement.stages):
        limit, kept = memory.limits[rank] * (1 + ROUNDING), list(accumulate(memory.forward[s] for s in stages))
        if kept[-1] > limit:
            raise PlanError(
                f"one microbatch alone needs {kept[-1]:g} of memory on rank {rank}, where the limit is "
                f"{memory.limits[rank]:g}"
            )
        for chunk, stage in enumerate(stages):
            own = kept[chunk]
            for until, all_of_it in zip(stages[chunk:], kept[chunk:], strict=True) if own and limit < math.inf else ():
                waits.append(Wait(stage, int((limit - all_of_it + own) / own), until, times.backward[until]))
                late = min(own, memory.weight[until])
                if late:
                    whole = times.backward[until] + times.rest[until]
                    waits.append(Wait(stage, 1 + int((limit - own) / late), until, whole))
    return tuple(waits)


@dataclass(frozen=True)
class RankRoom:
    """The memory of one rank in areas. ``split``: whether backwards may be split."""

    stages: Sequence[int]
    memory: MemoryModel
    limit: float
    times: StageTimes
    costs: StageCosts
    split: bool

    def least_step(self, heads: Paths, tails: Paths) -> float:
        """No step is shorter, by any of the functions. ``heads`` and ``tails`` are paths to and from operations."""
        kept, late = self._sizes
        if math.isinf(self.limit) or not any(kept):
            return 0.0
        parts = {math.floor(self.limit * (1 + ROUNDING) / size) for size in (*accumulate(kept), *kept, *late) if size}
        coming = sorted((row[s], chunk) for row in heads.forward for chunk, s in enumerate(self.stages))
        leaving = [
            (max(0.0, row[s] - self.times.backward[s] - self.times.early[s]), chunk)
            for row in tails.backward
            for chunk, s in enumerate(self.stages)
        ]
        for k in range(len(tails.backward)):  # of n that wait for their W, n - 1 are still to run
            leaving += [(k * self.costs.weight[s], chunk) for chunk, s in enumerate(self.stages, len(self.stages))]
        leaving.sort()
        return max(self._step(count, len(heads.forward), coming, leaving) for count in {0, *_PARTS, *parts})

    @property
    def _sizes(self) -> tuple[list[float], list[float]]:
        return [self.memory.forward[s] for s in self.stages], [self.memory.weight[s] for s in self.stages]

    def alone_from(self) -> int | None:
        """The first chunk from whose forward until the last chunk's backward the rank can keep nothing else, not even
        what waits for a W; None where there is none.
        """
        kept, late = self._sizes
        left = self.limit * (1 + ROUNDING) - min(kept[0], *late)
        return next((chunk for chunk, own in enumerate(accumulate(kept)) if own > left), None)

    def _step(self, parts: int, rounds: int, coming: Sequence[Event], leaving: Sequence[Event]) -> float:
        """By one function: all areas, and what cannot be used while the first forwards come and the last ones leave."""
        kept, late = self._sizes
        values = [self._value(size, parts) for size in accumulate(kept)]
        if not values[-1]:
            return 0.0
        most = [max(pair) for pair in zip(kept, late, strict=True)]
        filling = _gains([self._value(size, parts) for size in accumulate(most)])
        drained, waiting = _gains(values), [self._value(size, parts) for size in most]
        area, later = rounds * self._trip(values), rounds * sum(self._late(stage, parts) for stage in self.stages)
        least = _least(area, (coming, filling), (leaving, [*drained, *(0.0 for _ in waiting)]))
        return max(least, _least(area + later, (coming, filling), (leaving, [*drained, *waiting]))) if later else least

    def _value(self, size: float, parts: int) -> float:
        """Of so much memory; 0 parts: its share of the limit."""
        share = size / (self.limit * (1 + ROUNDING))
        whole = (parts + 1) * share
        if not parts or abs(whole - round(whole)) <= _CLOSE:
            return share
        return math.floor(whole) / parts

    def _trip(self, values: Sequence[float]) -> float:
        """Of a microbatch from its first forward here to the end of its last backward, at the least."""
        times, stages = self.times, self.stages
        area = values[-1] * times.trips[stages[-1]]
        for value, stage, after in zip(values, stages, stages[1:], strict=False):
            there = sum(times.output[stage:after])
            back = sum(times.gradient[stage + 1 : after + 1]) - times.backward[after] + times.backward[stage]
            area += value * (there + max(0.0, back))
        return area

    def _late(self, stage: int, parts: int) -> float:
        """What a microbatch still keeps when its backward could be over: in the rest of B, or until W is."""
        if not self.split:
            return 0.0
        kept, late = (self._value(of[stage], parts) for of in (self.memory.forward, self.memory.weight))
        least, costs = self.times.backward[stage], self.costs
        half = kept * (costs.backward_input[stage] - least) + late * costs.weight[stage]
        return min(kept * (costs.backward[stage] - least), half)


def _gains(values: Sequence[float]) -> list[float]:
    return [value - before for value, before in zip(values, [0.0, *values], strict=False)]


def _least(area: float, coming: Ramp, leaving: Ramp) -> float:
    """The least time that holds ``area`` where the memory fills up and empties like this."""
    (before, first), (after, last) = _unused(coming), _unused(leaving)
    least = area + max(before, after)
    if first + last > least:  # the two would overlap, so each counts for a part of the time
        first, last = (least * each / (first + last) for each in (first, last))
        before, after = _unused(coming, first)[0], _unused(leaving, last)[0]
    return max(least, area + before + after)


def _unused(ramp: Ramp, until: float = math.inf) -> tuple[float, float]:
    """How much of the memory, times time, cannot be in use, and when all of it can for the first time."""
    now = filled = unused = 0.0
    events, gains = ramp
    for time, kind in events:
        if filled >= 1 or time >= until:
            break
        unused += (time - now) * (1 - filled)
        now, filled = time, filled + gains[kind]
    if filled < 1 and until < math.inf:
        unused, now = unused + (until - now) * (1 - filled), until
    return unused, now
