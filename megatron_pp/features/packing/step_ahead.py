"""Finds the plan of one step from the costs of its microbatches, fast enough for the time of the step before.

First it finds the order of the microbatches, then the order of each rank. Equal arguments give equal answers on every
machine, because the search is limited by its work and not by time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron_pp.errors import PlanError
from megatron_pp.features.packing.proposal import Proposal, proposed
from megatron_pp.plan.builder import build_plan, with_whole_backwards
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders.list_scheduler import Problem, Rules, Scheduled, schedule
from megatron_pp.planner.improve import improved
from megatron_pp.planner.microbatch_order import Order, shortest_order
from megatron_pp.planner.plan_search import default_measured, slots_of
from megatron_pp.planner.timing import order_time

_TRIALS = 60  # trials for each start order, in a step of up to _FULL operations
_FULL = 1000
_SIMULATED = 3  # number of the list scheduler's orders that are simulated
_MOVED = 6  # number of local search's orders that are simulated
_EFFORT = 800  # budget of local search per operation; a million take about 2 s
_RULES = [Rules(ahead=ahead, patience=patience) for ahead, patience in product((0.0, 2.0, 4.0), (0.0, 0.5, 1.0))]


@dataclass(frozen=True)
class NextStep:
    """A step to plan.

    spec      the spec of the plan that its settings ask for
    costs     costs of its microbatches in the given order, in any unit; each above 0
    measured  times of the stages; None: all equal, with free transfers
    splits    whether the model can run weight gradients later than input gradients
    draws     whether forwards draw random numbers; then all forwards of a rank keep their order
    keeps_order  whether the microbatches run in the given order
    """

    spec: PlanSpec
    costs: tuple[float, ...]
    measured: Measured | None = None
    splits: bool = False
    draws: bool = False
    keeps_order: bool = False


@dataclass(frozen=True)
class StepAhead:
    """``order[k]``: the given microbatch that runs as the k-th. ``proposal``: its plan; None if the settings' own plan
    stays, for the reason in ``kept``."""

    order: Order
    proposal: Proposal | None = None
    kept: str = ""


def plan_ahead(step: NextStep) -> StepAhead:
    """The order of the step's microbatches, and its plan. Raises PlanError if the number of costs is not that of the
    spec's microbatches, or if no plan of the spec can be made."""
    if len(step.costs) != step.spec.num_microbatches:
        raise PlanError(f"{len(step.costs)} costs are given for {step.spec.num_microbatches} microbatches")
    plan = build_plan(step.spec)
    measured = step.measured or default_measured(plan.placement)
    if len(set(step.costs)) == 1:
        return StepAhead(tuple(range(len(step.costs))), kept="all microbatches cost the same")
    as_given = tuple(range(len(step.costs)))
    order = as_given if step.keeps_order else _order(plan, step.costs, measured)
    shares = _shares(step.costs, order)
    costs = replace(measured.costs(plan.placement.num_stages), microbatches=())
    found = proposed(
        plan,
        step.splits,
        step.draws,
        costs,
        measured.network(),
        shares,
        _in_given_order if step.keeps_order else _relisted,
    )
    return StepAhead(order, kept=found) if isinstance(found, str) else StepAhead(order, found)


def _shares(costs: Sequence[float], order: Order) -> tuple[float, ...]:
    mean = sum(costs) / len(costs)
    return tuple(costs[k] / mean for k in order)


def _order(plan: Plan, given: tuple[float, ...], measured: Measured) -> Order:
    costs = measured.costs(plan.placement.num_stages)

    def estimate(order: Order) -> float:
        taken = replace(costs, microbatches=_shares(given, order))
        return order_time(plan.orders, plan.placement, taken, measured.transfer, plan.spec.num_parts)

    operations = sum(map(len, plan.orders))
    return shortest_order(given, estimate, _TRIALS * _FULL // max(_FULL, operations))


def _relisted(plan: Plan, spec: PlanSpec, measured: Measured, allowed: Callable[[Plan], bool]) -> Iterator[Plan]:
    """The shortest plans that the list scheduler makes of the running order with these costs."""
    problem = Problem.of(plan.placement, spec.num_microbatches, measured)
    slots = slots_of([list(order) for order in plan.orders])
    found = dict[str, Scheduled]()
    for rules in _RULES:
        result = schedule(problem, slots, rules)
        if result is not None:
            found.setdefault(str(result.orders), result)
    for one in sorted(found.values(), key=lambda one: one.makespan)[:_SIMULATED]:
        made = lowered(replace(spec, split_backward=True), plan.placement, one.orders)
        if allowed(made):
            yield replace(made if spec.split_backward else with_whole_backwards(made), spec=spec)


def _in_given_order(plan: Plan, spec: PlanSpec, measured: Measured, allowed: Callable[[Plan], bool]) -> Iterator[Plan]:
    """The same, and the plans that local search makes of the running order."""
    yield from _relisted(plan, spec, measured, allowed)
    ops = {at.op for order in plan.orders for at in order}
    if spec.split_backward and {ins.BACKWARD, ins.WEIGHT_GRAD} <= ops:
        return  # local search cannot move orders with both whole and split backwards
    problem = Problem.of(plan.placement, spec.num_microbatches, measured)
    running = Scheduled([list(order) for order in plan.orders], 0.0)
    for one in improved(problem, running, 0.0, _EFFORT * sum(map(len, plan.orders)), _MOVED):
        made = lowered(replace(spec, split_backward=True), plan.placement, one.orders)
        if allowed(made):
            yield replace(made if spec.split_backward else with_whole_backwards(made), spec=spec)
