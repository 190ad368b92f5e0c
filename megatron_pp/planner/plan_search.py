"""The automatic scheduler: finds the best verified plan for measured times and a memory limit (arXiv 2401.10241,
section 3.1).

Every named family that fits is a candidate. Every named order, also if it does not fit, is a pattern for the greedy
scheduler. The greedy scheduler runs a pattern with the measured times under the memory limit, by many rules. Its best
results become patterns themselves. Local search (``improve.py``) makes the best ones shorter, until the lower bound
(``bound.py``) is reached. The plan that is shortest in the simulator wins, so the result is never worse than the best
named family under the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.activations import kept_timeline
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import MemoryModel
from megatron_pp.plan.ir.dataflow import RESULT_OF
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import OVERLAP, Plan, PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders.family import Announce, Family, Order
from megatron_pp.plan.orders.list_scheduler import ROUNDING, UNKNOWN, Problem, Rules, Scheduled, Slots, schedule
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner.bound import lower_bound
from megatron_pp.planner.improve import improved
from megatron_pp.planner.naive import naive_orders
from megatron_pp.planner.no_wait import no_wait

_FINALISTS = 6  # searched orders that are lowered and simulated
_IMPROVED = 3  # seeds whose best orders go into local search
_LOCAL = 50  # budget of local search per pair of operations
_MOST_LOCAL = 400_000  # largest budget of local search; a million takes 2 s
_SIMULATED = 2_000  # operations in all finalists of one seed; several, as equal orders differ after lowering
_ROUNDS = 2  # rounds in which the best results become patterns themselves
_PATIENCE = 5.0  # seconds of search before it is announced
_PILOT = 6  # a step of more than 6 P microbatches is searched at 6 P first, because the steady state repeats


@dataclass(frozen=True)
class FoundPlan:
    """A candidate. ``peaks`` is the peak memory of each rank, in the unit of the measured activations."""

    name: str
    plan: Plan
    makespan: float
    peaks: tuple[float, ...]


@dataclass(frozen=True)
class SearchResult:
    """The ``best`` plan, and each named family with whether it keeps to the limit."""

    best: FoundPlan
    named: tuple[tuple[FoundPlan, bool], ...]


@dataclass(frozen=True)
class _Trial:
    """The result of the greedy scheduler for one seed and one rule."""

    seed: str
    rules: Rules
    result: Scheduled


def slots_of(orders: Sequence[Order]) -> Slots:
    """Compute orders as a pattern: the slot of an operation is its place among the forwards and backwards."""
    slots = []
    for order in orders:
        compute = [at for at in order if at.op in RESULT_OF]
        slots.append({(RESULT_OF[at.op], at.chunk, at.mb): float(i) for i, at in enumerate(compute)})
    return slots


def search(
    spec: PlanSpec, families: Iterable[Family], placement_kind: str, announce: Announce | None = None
) -> SearchResult:
    """The best plan for ``spec`` on one placement, among ``families`` and plans that are made from them.

    Without ``spec.measured`` it assumes F = B = W = 1, free transfers, and the memory of 1F1B. A search of more than 5
    s is announced once. If no plan keeps to the memory limit, raises PlanError with the least memory that a family
    needs.
    """
    placement = Placement(placement_kind, spec.pipeline_size, spec.num_chunks)
    return _PlanSearch(spec, placement, families, _Patience(announce, spec)).run()


def default_measured(placement: Placement) -> Measured:
    """Equal times, free transfers, and the memory of 1F1B's first rank, P microbatches (a waiting W counts as a
    forward).
    """
    return Measured(memory_limit=float(placement.num_stages), weight_activation=1.0)


def peak_memory(order: Sequence[Instruction], stages: Sequence[int], memory: MemoryModel) -> float:
    """The most activation memory that a rank holds at the same time."""
    return max(kept_timeline(order, stages, memory.forward, memory.weight), default=0.0)


class _Patience:
    """Announces, once, a search that takes long."""

    def __init__(self, announce: Announce | None, spec: PlanSpec) -> None:
        self._announce = announce
        self._spec = spec
        self._until = time.monotonic() + _PATIENCE

    def look(self) -> None:
        """Announces the search if it is due. Called between plans."""
        spec = self._spec
        announce = self._announce
        if announce is not None and time.monotonic() > self._until:
            self._announce = None
            announce(
                f"schedule {spec.schedule}: the search for the best order of P={spec.pipeline_size}, "
                f"V={spec.num_chunks}, M={spec.num_microbatches} takes more than {_PATIENCE:g} s; every rank "
                "searches once and keeps the plan"
            )


def _may_run(plan: Plan) -> bool:
    """Whether ``verify`` accepts ``plan``."""
    try:
        verify(plan)
    except PlanError:
        return False
    return True


class _PlanSearch:
    def __init__(self, spec: PlanSpec, placement: Placement, families: Iterable[Family], patience: _Patience) -> None:
        self.spec = spec
        self.placement = placement
        self.patience = patience
        self.shape = spec.shape
        self.families = [family for family in families if family.chunks in (None, spec.num_chunks)]
        self.given = spec.measured or default_measured(placement)
        self.measured, self.unit = self.given.in_parts()
        self.problem = Problem.of(placement, spec.num_microbatches, self.measured)
        self.costs = self.problem.costs
        self.memory = self.problem.memory

    def run(self) -> SearchResult:
        orders = self._named_orders()
        named = [self._simulated(name, order) for name, order in orders.items()]
        found = [one for one in named if self._fits(one)]
        offloaded = [one for one in self._offloaded(orders) if self._fits(one)]
        least = self._least_makespan(named)
        if all(one.makespan > least * (1 + ROUNDING) for one in found):
            # No order needs less memory than one microbatch at a time. It is found also if all named patterns get
            # stuck.
            single = self._try([("one microbatch at a time", naive_orders(self.shape))], _Pool(least))
            grown = [*self._grow(orders, least), *single, *self._without_waits()]
            grown.sort(key=lambda trial: trial.result.makespan)
            for one in self._fitting(chain(grown, self._improved(grown, least))):
                found.append(one)
                if one.makespan <= least * (1 + ROUNDING) and _may_run(one.plan):
                    break
        for one in sorted([*found, *offloaded], key=lambda one: one.makespan):  # named plans before equals
            if _may_run(one.plan):
                best = self._as_given(one)
                others = tuple((self._beside(other, one, best), self._fits(other)) for other in named)
                return SearchResult(best, others)
        raise PlanError(self._why_none(named))

    def _as_given(self, one: FoundPlan) -> FoundPlan:
        """The plan with its makespan in the unit of the measured times."""
        if self.unit == 1.0 and self.measured == self.given:
            return one
        costs = self.given.costs(self.placement.num_stages)
        return replace(one, makespan=simulate(one.plan, costs, self.given.network()).makespan)

    def _beside(self, other: FoundPlan, one: FoundPlan, best: FoundPlan) -> FoundPlan:
        """``other`` in the unit of the measured times. ``best`` is ``one`` in that unit.

        If ``other`` is not shorter than ``one``, it does not become shorter by the rounding of sums in the other unit.
        """
        found = self._as_given(other)
        if other.makespan >= one.makespan and found.makespan < best.makespan:
            return replace(found, makespan=best.makespan)
        return found

    def _without_waits(self) -> list[_Trial]:
        """Orders without waits, for one chunk on each rank: several chunks of one microbatch would block each other."""
        possible = self.spec.num_chunks == 1 and not self.costs.microbatches
        found = no_wait(self.problem) if possible else None
        return [] if found is None else [_Trial("microbatches without waits", Rules(), found)]

    def _fitting(self, trials: Iterable[_Trial]) -> Iterator[FoundPlan]:
        """The plans of ``trials`` that keep to the limit. Some do not, because a backward may need more memory than it
        frees."""
        return (one for trial in trials for one in self._lowered(trial) if self._fits(one))

    def _lowered(self, trial: _Trial) -> Iterator[FoundPlan]:
        """The trial's plan. If messages delay it, also plans with receives and releases a slot further apart, because
        the clock of lowering does not know unequal times.
        """
        name = f"{self.spec.schedule} from {trial.seed}"
        spec = self.spec
        first = self._simulated(name, trial.result.orders)
        yield first
        if spec.policy == OVERLAP and first.makespan > trial.result.makespan * (1 + ROUNDING):
            apart = replace(spec, release_after=spec.release_after + 1, lookahead=spec.lookahead + 1)
            plan = lowered(apart, self.placement, trial.result.orders)
            yield self._judged(name, replace(plan, spec=spec), trial.result.orders)

    def _named_orders(self) -> dict[str, list[Order]]:
        """The orders of the families that do not offload by themselves."""
        return {family.name: family.orders(self.shape) for family in self.families if not family.added(self.shape)}

    def _seeds(self, named: dict[str, list[Order]]) -> dict[str, list[Order]]:
        """The named orders and, where groups have more than P microbatches, the same families in groups of P to save
        memory.
        """
        size = min(self.spec.pipeline_size, self.spec.num_microbatches)
        if self.shape.group_size <= size:
            return named
        shape = replace(self.shape, group_size=size)
        families = [family for family in self.families if family.name in named]
        return named | {f"{family.name} in groups of {size}": family.orders(shape) for family in families}

    def _least_makespan(self, named: Sequence[FoundPlan]) -> float:
        """A lower bound of all plans. Raises PlanError if not even one microbatch fits."""
        try:
            network = self.measured.network()
            count = self.spec.num_microbatches
            if self.costs.microbatches:  # no bound is known; only the memory of one microbatch is checked
                lower_bound(self.placement, 1, replace(self.costs, microbatches=()), network, self.memory)
                return 0.0
            return lower_bound(self.placement, count, self.costs, network, self.memory).step
        except PlanError as error:
            raise PlanError(self._why_none(named)) from error

    def _improved(self, trials: Sequence[_Trial], least: float) -> Iterator[_Trial]:
        """The trials that local search makes of the shortest trials."""
        of_seeds = {trial.seed: trial for trial in reversed(trials)}  # seed -> its shortest trial
        for trial in sorted(of_seeds.values(), key=lambda one: one.result.makespan)[:_IMPROVED]:
            self.patience.look()
            size = sum(map(len, trial.result.orders))
            effort = min(_LOCAL * size**2, _MOST_LOCAL)
            for result in improved(self.problem, trial.result, least, effort, max(_FINALISTS, _SIMULATED // size)):
                yield replace(trial, result=result)

    def _simulated(self, name: str, orders: Sequence[Order]) -> FoundPlan:
        self.patience.look()
        return self._judged(name, lowered(self.spec, self.placement, orders), orders)

    def _judged(self, name: str, plan: Plan, lines: Sequence[Sequence[Instruction]]) -> FoundPlan:
        """``plan`` with its time and memory. ``lines`` has each rank's instructions, at least those that change
        memory."""
        makespan = simulate(plan, self.costs, self.measured.network()).makespan
        peaks = tuple(peak_memory(line, self.placement.stages[r], self.memory) for r, line in enumerate(lines))
        return FoundPlan(name, plan, makespan, peaks)

    def _offloaded(self, orders: dict[str, list[Order]]) -> Iterator[FoundPlan]:
        """The named orders with offloaded chunks, if copies were measured. They have enough slots to hide the longest
        copy behind operations of mean length.
        """
        costs = self.costs
        chunks = self.spec.num_chunks
        if "offload" not in dict(self.measured.added) or not math.isfinite(max(self.memory.limits)):
            return
        mean = sum((*costs.forward, *costs.backward)) / (2 * costs.num_stages)
        slots = max(1, math.ceil(max(costs.offload) / mean - ROUNDING)) if mean else 1
        wanted = self.spec.offload_chunks
        made = {family.name: family.orders(self.shape) for family in self.families if family.name not in orders}
        for name, order in (orders | made).items():
            for count in range(1, chunks + 1) if wanted is None else [wanted] * (wanted > 0):
                self.patience.look()
                spec = replace(self.spec, offload_slots=slots)
                plan = lowered(spec, self.placement, order, settings={**dict(spec.added), "offload_chunks": count})
                yield self._judged(f"{name} with {count} chunk(s) offloaded", plan, plan.programs)

    def _fits(self, one: FoundPlan) -> bool:
        return all(peak <= limit * (1 + ROUNDING) for peak, limit in zip(one.peaks, self.memory.limits, strict=True))

    def _grow(self, named: dict[str, list[Order]], least: float) -> list[_Trial]:
        """The best results of the greedy scheduler for the named orders, shortest first."""
        seeds = self._seeds(named)
        pilot_size = _PILOT * self.spec.pipeline_size
        if self.spec.num_microbatches > pilot_size:
            smaller = replace(self.spec, num_microbatches=pilot_size)
            if self.costs.microbatches:
                fewer = replace(self.measured, microbatches=self.costs.microbatches[:pilot_size])
                smaller = replace(smaller, measured=fewer)
            pilot = _PlanSearch(smaller, self.placement, self.families, self.patience)
            first = pilot._seeds(pilot._named_orders())
            promising = {(t.seed, t.rules) for t in pilot._try(first.items(), _Pool())}
            return self._try(seeds.items(), _Pool(least), promising)
        pool = _Pool(least)
        patterns: Iterable[tuple[str, Sequence[Order]]] = seeds.items()
        for _ in range(_ROUNDS):
            patterns = [(trial.seed, trial.result.orders) for trial in self._try(patterns, pool)]
        return pool.trials

    def _try(
        self,
        patterns: Iterable[tuple[str, Sequence[Order]]],
        pool: _Pool,
        promising: Collection[tuple[str, Rules]] | None = None,
    ) -> list[_Trial]:
        """Tries every rule, or only the ``promising`` ones, on every pattern, and puts the results into ``pool``. Ends
        early if a plan is the best possible one. Returns the pool's trials.
        """
        for name, orders in patterns:
            slots = slots_of(orders)
            for rule in self._rules():
                if promising is not None and (name, rule) not in promising:
                    continue
                self.patience.look()
                result = schedule(self.problem, slots, rule, pool.most)
                if result is None:
                    continue
                pool.add(trial := _Trial(name, rule, result))
                if result.makespan <= pool.least and any(one.makespan <= pool.least for one in self._fitting([trial])):
                    return pool.trials
        return pool.trials

    def _rules(self) -> list[Rules]:
        """The rules to try on every pattern."""
        size = self.spec.pipeline_size
        unit = max(self.memory.forward)
        base = [
            Rules(ahead=ahead, reserve=reserve * unit)
            for ahead in (2.0, 0.0, 4.0, float(2 * size), float(6 * size))
            for reserve in (0, 1, 2)
        ]
        patient = [replace(rule, patience=patience) for rule in base for patience in (0.5, 1.0)]
        return [*base, Rules(split=False), Rules(split=False, ahead=2.0), *patient]

    def _why_none(self, named: Sequence[FoundPlan]) -> str:
        limits = self.memory.limits
        over = [max((peak - limits[r], r, one.name) for r, peak in enumerate(one.peaks)) for one in named]
        excess, rank, name = min(over, key=lambda found: found[:2])
        limit = limits[rank]
        least = [sum(self.memory.forward[s] for s in stages) for stages in self.placement.stages]
        short = [r for r, most in enumerate(limits) if least[r] > most * (1 + ROUNDING)]
        single = f"; one microbatch alone needs {least[short[0]]:g} on rank {short[0]}" if short else ""
        return (
            f"no schedule of {self.spec.num_microbatches} microbatches keeps to the memory limit; {name} needs "
            f"least: {limit + excess:g} on rank {rank}, but the limit is {limit:g}{single}"
        )


class _Pool:
    """The shortest trials, each order once. They are sorted by length; of equal trials, the older is first. No trial is
    shorter than ``least``."""

    def __init__(self, least: float = 0.0) -> None:
        self.trials: list[_Trial] = []
        self.least = least * (1 + ROUNDING)

    @property
    def most(self) -> float:
        """The greatest length of a result that still gets into the pool."""
        return self.trials[-1].result.makespan if len(self.trials) == _FINALISTS else UNKNOWN

    def add(self, trial: _Trial) -> None:
        if all(trial.result.orders != known.result.orders for known in self.trials):
            self.trials = sorted([*self.trials, trial], key=lambda one: one.result.makespan)[:_FINALISTS]
