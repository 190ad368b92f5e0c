"""In which order to run microbatches that cost different times: sequences of different lengths, packed or not."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.planner.advise.evaluate import Outcome
from megatron_pp.planner.advise.model import Model
from megatron_pp.planner.advise.question import Question
from megatron_pp.planner.advise.timing import order_time

_TRIALS = 600  # of each order that is begun with


@dataclass(frozen=True)
class MicrobatchOrder:
    """``order[k]``: the given microbatch that runs as the k-th. Simulated milliseconds of a step in this order and as
    given.
    """

    order: tuple[int, ...]
    step: float
    step_as_given: float


def best_order(question: Question, outcome: Outcome, seconds: float) -> MicrobatchOrder | None:
    """The best order for the outcome's plan found in ``seconds``; None where all microbatches cost the same.

    Starts are ascending, descending, and the short ones at both ends (they fill and drain the pipeline quickly) or in
    the middle; swaps of two follow. The given order is returned where none is faster by the simulator.
    """
    given = question.microbatch_costs
    if outcome.spec is None or outcome.fit is None or len(given) != outcome.candidate.num_microbatches:
        return None
    plan = build_plan(outcome.spec)
    problem = _Problem(question, plan, outcome.fit.costs, question.model(outcome.candidate.micro_batch))
    starts = sorted(_first_orders(given), key=problem.estimate)
    until, each = time.monotonic(), seconds / len(starts)
    order = min((problem.improved(one, until + k * each) for k, one in enumerate(starts, 1)), key=problem.estimate)
    in_turn = tuple(range(len(given)))
    as_given, step = problem.step(in_turn), problem.step(order)
    if step >= as_given:
        order, step = in_turn, as_given
    return MicrobatchOrder(order, step, as_given)


def _first_orders(given: Sequence[float]) -> list[tuple[int, ...]]:
    up = sorted(range(len(given)), key=lambda k: given[k])
    down = up[::-1]
    ends, middle = up[::2] + up[1::2][::-1], down[::2] + down[1::2][::-1]
    return [tuple(range(len(given))), tuple(up), tuple(down), tuple(ends), tuple(middle)]


@dataclass(frozen=True)
class _Problem:
    question: Question
    plan: Plan
    costs: StageCosts
    model: Model

    def _of(self, order: Sequence[int]) -> StageCosts:
        return replace(self.costs, microbatches=tuple(self.question.microbatch_costs[k] for k in order))

    def estimate(self, order: Sequence[int]) -> float:
        plan, transfer = self.plan, self.question.transfer(self.model)
        return order_time(plan.orders, plan.placement, self._of(order), transfer, plan.spec.slices)

    def step(self, order: Sequence[int]) -> float:
        network = self.question.network(self.model)
        return simulate(self.plan, self._of(order), network, self.plan.spec.device).makespan

    def improved(self, order: tuple[int, ...], until: float) -> tuple[int, ...]:
        """After swaps of two and moves of one that do not lengthen the estimate."""
        chance, best = random.Random(0), self.estimate(order)
        for _ in range(_TRIALS):
            if time.monotonic() > until:
                break
            a, b = sorted(chance.sample(range(len(order)), 2))
            between = order[a + 1 : b]
            last = (order[b], *between, order[a]) if chance.random() < 0.5 else (*between, order[b], order[a])
            changed = (*order[:a], *last, *order[b + 1 :])
            found = self.estimate(changed)
            if found <= best:
                best, order = found, changed
        return order
