"""Finds an order for microbatches that take different times, because their sequences have different lengths."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.planner.microbatch_order import shortest_order
from megatron_pp.planner.timing import order_time
from megatron_pp.tools.advise.evaluate import Outcome
from megatron_pp.tools.advise.question import Question

_TRIALS = 600  # trials for each start order
# Start orders, and estimates of them without trials.
_STARTS = 5
_LOOKS = 15
_OPERATIONS = 2_400_000  # operations of all estimates without a budget: 4 s


@dataclass(frozen=True)
class MicrobatchOrder:
    """An order of microbatches. ``order[k]`` is the given microbatch that runs as the k-th. The steps are the simulated
    milliseconds in this order and in the given one.
    """

    order: tuple[int, ...]
    step: float
    step_as_given: float


def best_order(question: Question, outcome: Outcome, seconds: float | None = None) -> MicrobatchOrder | None:
    """The best order for the outcome's plan that is found in ``seconds``; None if all microbatches cost the same.

    Without ``seconds`` the search ends after a fixed number of operations, so the answer is the same on every machine.
    If no other order is faster in the simulator, the given order is returned.
    """
    given = question.microbatch_costs
    if outcome.spec is None or outcome.fit is None or len(given) != outcome.candidate.num_microbatches:
        return None
    plan = build_plan(outcome.spec)
    model = question.model(outcome.candidate.micro_batch)
    costs = outcome.fit.costs
    transfer = question.transfer(model)
    network = question.network(model)

    def costs_in(order: Sequence[int]) -> StageCosts:
        return replace(costs, microbatches=tuple(given[k] for k in order))

    def estimate(order: Sequence[int]) -> float:
        return order_time(plan.orders, plan.placement, costs_in(order), transfer, plan.spec.num_parts)

    def step_in(order: Sequence[int]) -> float:
        return simulate(plan, costs_in(order), network, plan.spec.device).makespan

    def is_over(share: float) -> bool:
        return seconds is not None and time.monotonic() > began + share * seconds

    began = time.monotonic()
    in_turn = tuple(range(len(given)))
    trials = _TRIALS
    if seconds is None:
        trials = min(_TRIALS, (_OPERATIONS // sum(map(len, plan.orders)) - _LOOKS) // _STARTS)
    order = in_turn if trials < 0 else shortest_order(given, estimate, trials, is_over)
    as_given = step_in(in_turn)
    step = step_in(order)
    if step >= as_given:
        order = in_turn
        step = as_given
    return MicrobatchOrder(order, step, as_given)
