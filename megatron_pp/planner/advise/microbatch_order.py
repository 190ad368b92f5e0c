"""In which order to run microbatches that cost different times: sequences of different lengths, packed or not."""

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
from megatron_pp.planner.microbatch_order import shortest_order

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

    The given order is returned where none is faster by the simulator.
    """
    given = question.microbatch_costs
    if outcome.spec is None or outcome.fit is None or len(given) != outcome.candidate.num_microbatches:
        return None
    plan = build_plan(outcome.spec)
    problem = _Problem(question, plan, outcome.fit.costs, question.model(outcome.candidate.micro_batch))
    began = time.monotonic()
    order = shortest_order(given, problem.estimate, _TRIALS, lambda share: time.monotonic() > began + share * seconds)
    in_turn = tuple(range(len(given)))
    as_given, step = problem.step(in_turn), problem.step(order)
    if step >= as_given:
        order, step = in_turn, as_given
    return MicrobatchOrder(order, step, as_given)


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
