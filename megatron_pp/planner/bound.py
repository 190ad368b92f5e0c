"""A lower bound of a step's time: no plan on the same placement is shorter, whatever its order.

Each term holds for every plan, so the largest term is a bound:

critical path     One microbatch goes forward through all stages and back. Operations of one stage run one after
another,
                  so the k-th microbatch is later by at least k times the slowest stage.
work of a rank    A rank's operations run one after another. An operation has a shortest path to it (the warm-up) and
from
                  it to the end of the step (the drain). ``least_end`` is the best preemptive schedule of such jobs on
                  one machine.
link a to b       The messages of a directed link pass the wire one after another, in the same way.
memory            The memory limit makes forwards wait for earlier backwards and W, which gives more paths
                  (``bound_work.py``).
memory of rank r  Its work with these paths before and behind it. Before its first backwards and after its last ones the
                  rank can do only what fits into memory. So it is idle and later work starts later, which gives more
                  paths for all ranks. If a forward leaves no room for anything else, the rank has nothing else to do
                  until that microbatch comes back.

The bound is for microbatches of equal cost. If sequences are cut into slices, a slice counts on paths as the cheapest
slice, and the memory terms are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import FREE, MemoryModel, Network, StageCosts
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, PASSES
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.planner.bound_paths import PathFinder, Paths, StageTimes
from megatron_pp.planner.bound_work import RankWork, alone_from, waits_of


class Job(NamedTuple):
    """The times before a job can start (``head``), on the machine, and after it (``tail``)."""

    head: float
    time: float
    tail: float


def least_end(jobs: Iterable[Job]) -> float:
    """The earliest time at which all tails can be over if jobs may be interrupted; 0 without jobs.

    Jackson's preemptive schedule is the best schedule with interruptions. Of the jobs that can start, it always runs
    the job with the longest tail (Carlier 1982, "The one-machine sequencing problem").
    """
    waiting: list[tuple[float, float]] = []  # (-tail, time left)
    now = end = 0.0
    for head, time, tail in sorted(jobs):
        while waiting and now < head:
            longest, left = waiting[0]
            if now + left > head:
                heapreplace(waiting, (longest, left - (head - now)))
                now = head
            else:
                heappop(waiting)
                now += left
                end = max(end, now - longest)
        now = max(now, head)
        heappush(waiting, (-tail, time))
    while waiting:
        longest, left = heappop(waiting)
        now += left
        end = max(end, now - longest)
    return end


CRITICAL_PATH = "critical path"
MEMORY = "memory"
_CLOSE = 1e-9  # relative error by rounding of sums


@dataclass(frozen=True)
class Bound:
    """A lower bound: no plan takes less time.

    step    time of a step, in the unit of the costs
    reason  the largest term: critical path, work of rank r, link a to b, memory, memory of rank r
    terms   every term with its time
    """

    step: float
    reason: str
    terms: tuple[tuple[str, float], ...]

    def excess(self, step: float) -> float:
        """The share by which a step of ``step`` is longer than the bound: 0.02 is within 2%."""
        excess = step / self.step - 1.0 if self.step else 0.0
        return 0.0 if abs(excess) < _CLOSE else excess

    def of_step(self, step: float) -> Bound:
        """The same bound; or ``step``, if it is shorter than the bound only by rounding of sums in another order."""
        return replace(self, step=step) if step < self.step <= step * (1 + _CLOSE) else self

    def beside(self, step: float, unit: str = "") -> str:
        """The distance of a step of ``step`` from the bound, in words."""
        least = f"{self.step:.4g} {unit}".strip()
        return f"within {self.excess(step):.1%} of the bound, {least} ({self.reason})"


def lower_bound(
    placement: Placement,
    num_microbatches: int,
    costs: StageCosts,
    network: Network = FREE,
    memory: MemoryModel | None = None,
    *,
    split: bool = True,
    forward_only: bool = False,
    slices: int = 1,
) -> Bound:
    """The bound of all plans for ``num_microbatches`` on ``placement``, in the unit of ``costs``.

    ``memory`` limits activations as for ``auto``; None is no limit. Without ``split`` every backward is whole. Raises
    PlanError for costs of another number of stages, or if one microbatch alone exceeds the memory limit.
    """
    if costs.num_stages != placement.num_stages:
        raise PlanError(f"costs are given for {costs.num_stages} stages; the placement has {placement.num_stages}")
    if costs.microbatches:
        raise PlanError("a bound needs microbatches of equal cost; leave StageCosts.microbatches out")
    costs = costs.placed(placement)
    times = StageTimes.of(placement, costs, network, split, forward_only, slices)
    rounds = num_microbatches if slices == 1 else 1
    problem = _Problem(placement, num_microbatches, costs, network, times, split, forward_only, slices)
    terms = list(problem.terms(PathFinder(times, rounds, forward_only=forward_only)))
    if memory is not None and slices == 1 and not forward_only:
        terms += problem.memory_terms(PathFinder(times, rounds, waits_of(placement, memory, times)), memory)
    reason, step = max(terms, key=lambda term: term[1])
    return Bound(step, reason, tuple(terms))


def bound_of(plan: Plan, costs: StageCosts, network: Network = FREE, memory: MemoryModel | None = None) -> Bound:
    """The bound of all plans with the placement and microbatches of ``plan``. Backwards are split if the model can
    split them. If ``plan`` offloads, memory terms are left out. Raises PlanError as ``lower_bound`` does.
    """
    spec = plan.spec
    memory = None if plan.copies_to_host else memory
    kind = {"split": spec.split_backward, "forward_only": spec.forward_only}
    return lower_bound(plan.placement, spec.num_microbatches, costs, network, memory, slices=spec.num_parts, **kind)


@dataclass(frozen=True)
class _Problem:
    placement: Placement
    num_microbatches: int
    costs: StageCosts
    network: Network
    times: StageTimes
    split: bool
    forward_only: bool
    slices: int

    def terms(self, finder: PathFinder) -> Iterator[tuple[str, float]]:
        heads = finder.heads()
        tails = finder.tails()
        yield CRITICAL_PATH, tails.forward[0][0]
        for rank in range(self.placement.pipeline_size):
            yield f"work of rank {rank}", least_end(self._work(rank, heads, tails))
        for (source, target), jobs in self._messages(heads, tails).items():
            yield f"link {source} to {target}", least_end(jobs)

    def memory_terms(self, finder: PathFinder, memory: MemoryModel) -> Iterator[tuple[str, float]]:
        ranks = []
        for row, limit in zip(self.placement.stages, memory.limits, strict=True):
            waits = [wait for wait in finder.waits if wait.stage in row]
            ranks.append(RankWork(row, self.num_microbatches, self.times, memory, limit, waits))
        heads = finder.heads()
        tails = finder.tails()
        before = finder.nothing
        behind = finder.nothing
        for rank in ranks:
            rank.heads(rank.from_start(heads), before)
            rank.tails(rank.from_end(tails), behind)
        heads = finder.heads(before)
        tails = finder.tails(behind)
        known = tails.forward[0][0]
        yield MEMORY, known
        for number, rank in enumerate(ranks):
            alone = alone_from(rank.stages, memory, rank.limit)
            ends = [least_end(self._work(number, heads, tails, way)) for way in {None, alone}]
            yield f"memory of rank {number}", max(*ends, rank.end(heads, tails, max(known, *ends)))

    def _work(self, rank: int, heads: Paths, tails: Paths, alone: int | None = None) -> Iterator[Job]:
        """All operations of ``rank`` as jobs. A backward is two jobs: up to its input gradient, and the rest, which is
        in its W or at the end of a whole B. The passes of a split output layer are one job.
        """
        times = self.times
        each = self.num_microbatches / len(heads.forward)
        if self.placement.barriers:
            yield Job(0.0, self.num_microbatches * sum(self.costs.of(op, 0) for op in PASSES), 0.0)
        stages = self.placement.stages[rank]
        first = stages[-1] + 1 if alone is None else stages[alone]
        last = stages[-1]
        for stage in stages:
            f, b, rest = self._full(stage)
            for k in range(len(heads.forward) if stage < first else 0):
                yield Job(heads.forward[k][stage], each * f, max(0.0, tails.forward[k][stage] - times.forward[stage]))
            for k in range(0 if self.forward_only else len(heads.backward)):
                left = max(0.0, tails.backward[k][stage] - times.backward[stage] - times.early[stage])
                if alone is None or stage < last:
                    yield Job(heads.backward[k][stage], each * b, left)
                else:
                    together = sum(times.output[first:last]) + times.trips[last]
                    yield Job(heads.forward[k][first], together, left)
                if rest:
                    yield Job(heads.backward[k][stage] + times.backward[stage], each * rest, 0.0)

    def _full(self, stage: int) -> tuple[float, float, float]:
        """Times of a whole sequence: forward, backward up to its input gradient, and the rest."""
        whole = self.costs.backward[stage]
        if not self.split:
            return self.costs.forward[stage], whole, 0.0
        half = self.costs.backward_input[stage]
        weight = self.costs.weight[stage]
        least = min(whole, half)
        return self.costs.forward[stage], least, min(whole, half + weight) - least

    def _messages(self, heads: Paths, tails: Paths) -> dict[tuple[int, int], list[Job]]:
        """The messages of each directed link, as jobs of its wire."""
        found: dict[tuple[int, int], list[Job]] = {}
        homes = self.placement.homes
        each = self.num_microbatches / len(heads.forward)
        moved = [(FORWARD, stage, stage + 1, heads.forward, tails.forward) for stage in range(len(homes) - 1)]
        if not self.forward_only:
            moved += [(BACKWARD, stage, stage - 1, heads.backward, tails.backward) for stage in range(1, len(homes))]
        for kind, one, other, before, after in moved:
            source = homes[one][0]
            target = homes[other][0]
            link = self.network.between(source, target)
            wire = link.wire_time(self.network.message_bytes(kind))
            if source == target or not wire:
                continue
            there = self.times.output[one] if kind == FORWARD else self.times.gradient[one]
            sent = there - link.latency - wire / self.slices
            jobs = found.setdefault((source, target), [])
            for head, tail in zip(before, after, strict=True):
                jobs.append(Job(head[one] + sent, each * wire, link.latency + tail[other]))
        return found
