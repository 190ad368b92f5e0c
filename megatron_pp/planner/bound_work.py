"""The terms that a memory limit adds to a step's lower bound: waits of forwards, microbatches that leave a rank no room
for others, and the most work that a rank can have done by a time.

By time t a rank can have run only operations whose paths allow a start before t. Its forwards need memory: the limit,
and the memory that backwards and W have freed by then. So the most work by t, m(t), is a fractional knapsack of
forwards. The rank was idle for at least t - m(t), and by a later t' it has done at most m(t) + t' - t. So an operation
that follows work w of its own rank cannot start before w + max(t - m(t) | m(t) < w).

The same holds backwards from the end of the step. In the last interval of length u, only operations run whose path to
the end is at most u. If the W of a microbatch is in this interval and its forward is not, the microbatch keeps memory
from the start of the interval. So this knapsack is of backwards with their W, and of W alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, product
from operator import itemgetter
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import MemoryModel
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders.list_scheduler import ROUNDING
from megatron_pp.planner.bound_paths import Paths, StageTimes, Table, Wait


def waits_of(placement: Placement, memory: MemoryModel, times: StageTimes) -> tuple[Wait, ...]:
    """The waits of forwards of each stage. Raises PlanError if one microbatch alone exceeds the limit.

    Take n microbatches between their forward of a stage and their backward of ``until``, a stage of the same rank. Each
    of them keeps the chunks up to the earlier of the two stages, and one microbatch keeps more. If ``until`` is later,
    this is the first microbatch to run that backward: it has all chunks up to there. Otherwise it is the last
    microbatch: it has the chunks up to ``stage`` when its forward starts. If forwards wait for the end of W, each of
    the other microbatches may keep only the memory that its W needs.
    """
    waits: list[Wait] = []
    for rank, stages in enumerate(placement.stages):
        limit = memory.limits[rank] * (1 + ROUNDING)
        kept = list(accumulate(memory.forward[s] for s in stages))
        if kept[-1] > limit:
            raise PlanError(
                f"one microbatch alone needs {kept[-1]:g} of memory on rank {rank}, but the limit is "
                f"{memory.limits[rank]:g}"
            )
        if limit == math.inf:
            continue
        for stage, own in zip(stages, kept, strict=True):
            for until, whole in zip(stages, kept, strict=True):
                least = min(own, whole)  # memory that each other microbatch keeps until that backward
                if not least:
                    continue
                most = int((limit - whole) / own) if until >= stage else int((limit - own) / least)
                waits.append(Wait(stage, 1 + most, until, times.backward[until], False))
                least = min(least, memory.weight[until])
                if least:
                    time = times.backward[until] + times.rest[until]
                    waits.append(Wait(stage, 1 + int((limit - own) / least), until, time, True))
    return tuple(waits)


def alone_from(stages: Sequence[int], memory: MemoryModel, limit: float) -> int | None:
    """The first chunk whose microbatch fills the rank: from this chunk's forward to the last chunk's backward there is
    no room for another operation, not even for the memory that a W needs. None if there is no such chunk.
    """
    kept = list(accumulate(memory.forward[s] for s in stages))
    left = limit * (1 + ROUNDING) - min(kept[0], *(memory.weight[s] for s in stages))
    return next((chunk for chunk, own in enumerate(kept) if own > left), None)


_F, _B, _W = range(3)


class _Item(NamedTuple):
    """An operation: its time, and the memory that it takes; below 0 if it frees memory."""

    time: float
    memory: float


@dataclass(frozen=True)
class Curve:
    """By time ``times[i]`` a rank has done at most the work ``works[i]``, and was idle for at least ``idles[i]``. All
    three are ascending."""

    times: Sequence[float]
    works: Sequence[float]
    idles: Sequence[float]

    @classmethod
    def of(
        cls, items: Sequence[_Item], counts: Sequence[int], starts: Iterable[tuple[float, int]], room: float
    ) -> Curve:
        """The curve of a rank with these items and ``room`` for memory.

        ``counts`` of each item can start at time 0. A start (time, index) allows one more of an item from this time on.
        """
        takers = [i for i, item in enumerate(items) if item.memory > 0]
        takers.sort(key=lambda i: -items[i].time / items[i].memory)
        sizes = {items[i].memory for i in takers}
        counts = list(counts)
        times = list[float]()
        works = list[float]()
        done = sum(n * item.time for n, item in zip(counts, items, strict=True) if item.memory <= 0)
        for time, group in groupby(sorted(starts), itemgetter(0)):
            work = done
            left = room
            if len(sizes) == 1 and left < math.inf:
                left = math.floor(left / min(sizes) * (1 + ROUNDING)) * min(sizes)
            for i in takers:
                n = min(counts[i], left / items[i].memory)
                work = work + n * items[i].time
                left = left - n * items[i].memory
            times.append(time)
            works.append(work)
            for _, i in group:
                counts[i] += 1
                if items[i].memory <= 0:
                    done, room = done + items[i].time, room - items[i].memory
        idles = (max(0.0, time - work) for time, work in zip(times, works, strict=True))
        return cls(times, works, list(accumulate(idles, max)))

    def time_for(self, work: float) -> float:
        """The earliest time at which ``work`` is done."""
        behind = bisect_left(self.works, work * (1 - ROUNDING))
        return work + (self.idles[behind - 1] if behind else 0.0)

    def idle_by(self, time: float) -> float:
        before = bisect_right(self.times, time)
        return self.idles[before - 1] if before else 0.0


@dataclass(frozen=True)
class RankWork:
    """The operations of a rank: ``count`` of each kind for each of its ``stages``. ``waits`` are waits of its
    forwards."""

    stages: Sequence[int]
    count: int
    times: StageTimes
    memory: MemoryModel
    limit: float
    waits: Sequence[Wait]

    @cached_property
    def _each(self) -> list[float]:
        """The times of F, B and the rest of B's work (W) of each chunk."""
        times = self.times
        return [time for s in self.stages for time in (times.forward[s], times.backward[s], times.rest[s])]

    def _kept(self, stage: int) -> tuple[float, float]:
        """The memory that a forward keeps, and the part of it that is kept until W."""
        return self.memory.forward[stage], min(self.memory.forward[stage], self.memory.weight[stage])

    def from_start(self, heads: Paths) -> Curve:
        items = list[_Item]()
        starts = list[tuple[float, int]]()
        for stage in self.stages:
            first = len(items)
            kept, late = self._kept(stage)
            f, b, w = self._each[first : first + 3]
            items += [_Item(f, kept), _Item(b, late - kept), _Item(w, -late)]
            for forward, backward in zip(heads.forward, heads.backward, strict=True):
                starts += [(forward[stage], first + _F), (backward[stage], first + _B)]
                starts.append((backward[stage] + b, first + _W))
        return Curve.of(items, [0] * len(items), starts, self.limit * (1 + ROUNDING))

    def from_end(self, tails: Paths) -> Curve:
        """The curve with ``times`` counted from the end of the step."""
        items = list[_Item]()
        starts = list[tuple[float, int]]()
        times = self.times
        for stage in self.stages:
            first = len(items)
            kept, late = self._kept(stage)
            f, b, w = self._each[first : first + 3]
            items += [_Item(f, -kept), _Item(b + w, kept), _Item(w, late)]
            for forward, backward in zip(tails.forward, tails.backward, strict=True):
                starts.append((max(0.0, forward[stage] - f), first + _F))
                starts.append((max(0.0, backward[stage] - b - times.early[stage]), first + _B))
        return Curve.of(items, [0, 0, self.count] * len(self.stages), starts, self.limit * (1 + ROUNDING))

    @cached_property
    def _lags(self) -> list[list[float]]:
        """The lags ``[x][y]``: the k-th operation x of this rank ends before the (k + lag)-th operation y starts."""
        size = len(self._each)
        chunks = range(len(self.stages))
        lags = [[math.inf] * size for _ in range(size)]
        for one in chunks:
            for kind in (_F, _B, _W):
                lags[3 * one + kind][3 * one + kind] = 1
            lags[3 * one + _B][3 * one + _W] = 0
            for other in chunks:
                lags[3 * one + _F][3 * other + _B] = 0
                if one < other:
                    lags[3 * one + _F][3 * other + _F] = lags[3 * other + _B][3 * one + _B] = 0
        for wait in self.waits:
            until = 3 * self.stages.index(wait.until)
            other = 3 * self.stages.index(wait.stage)
            one = until + (_W if wait.whole else _B)
            lags[one][other] = min(lags[one][other], wait.most)
        for via, one, other in product(range(size), repeat=3):
            lags[one][other] = min(lags[one][other], lags[one][via] + lags[via][other])
        return lags

    def heads(self, curve: Curve, least: Paths) -> None:
        """Writes into ``least`` the earliest start of each operation, given this rank's work before it."""
        for at, rows, stage in self._targets(least):
            before = [(time, lags[at]) for time, lags in zip(self._each, self._lags, strict=True)]
            for k, row in enumerate(rows):
                row[stage] = curve.time_for(sum(time * (k + 1 - lag) for time, lag in before if k >= lag))

    def tails(self, curve: Curve, least: Paths) -> None:
        """Writes into ``least`` the least time from each start to the end of the step, given this rank's work after
        it."""
        for at, rows, stage in self._targets(least):
            behind = list(zip(self._each, self._lags[at], strict=True))
            for k, row in enumerate(reversed(rows)):
                work = sum(time * (k + 1 - lag) for time, lag in behind if k >= lag)
                row[stage] = self._each[at] + curve.time_for(work)

    def _targets(self, least: Paths) -> Iterator[tuple[int, Table, int]]:
        for chunk, stage in enumerate(self.stages):
            yield 3 * chunk + _F, least.forward, stage
            yield 3 * chunk + _B, least.backward, stage

    def end(self, heads: Paths, tails: Paths, known: float) -> float:
        """The earliest end of the step: the sum of this rank's work and its idle times at both ends. In a step of at
        least ``known``, a lower bound, the idle times that are added do not overlap.
        """
        start = self.from_start(heads)
        end = self.from_end(tails)
        most = 0.0
        for time, idle in zip(start.times, start.idles, strict=True):
            if time <= known:
                most = max(most, idle + end.idle_by(known - time))
        return self.count * sum(self._each) + most
