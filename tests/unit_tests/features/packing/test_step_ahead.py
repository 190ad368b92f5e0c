"""The plan of one step from its microbatches' costs: shorter, verified, the same everywhere, sums in their order."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from megatron_pp.errors import PipelineError, PlanError
from megatron_pp.features.packing import ahead
from megatron_pp.features.packing.proposal import _sums
from megatron_pp.features.packing.step_ahead import NextStep, StepAhead, plan_ahead
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner.microbatch_order import shortest_order

SPEC = PlanSpec("1f1b", 4, 1, 12)


def drawn(count: int) -> tuple[float, ...]:
    chance = random.Random(5)
    return tuple(chance.choice([0.5, 1.0, 1.0, 2.0, 4.0]) for _ in range(count))


def step_of(plan: object, costs: tuple[float, ...], order: tuple[int, ...]) -> float:
    taken = replace(StageCosts.uniform(4), microbatches=tuple(costs[k] for k in order))
    return simulate(plan, taken).makespan  # type: ignore[arg-type]


@pytest.mark.parametrize("splits", [False, True])
def test_the_order_is_shorter_and_the_plan_shorter_still(splits: bool) -> None:
    step = NextStep(SPEC, drawn(12), splits=splits)
    found = plan_ahead(step)
    assert sorted(found.order) == list(range(12))
    running = build_plan(SPEC)
    as_given, chosen = (step_of(running, step.costs, order) for order in (tuple(range(12)), found.order))
    assert chosen < 0.9 * as_given
    if found.proposal is None:
        assert not splits
        assert "finds none that is shorter" in found.kept
        return
    plan = found.proposal.plan()
    verify(plan)
    assert step_of(plan, step.costs, found.order) < 0.99 * chosen
    assert [_sums(one, False) for one in plan.orders] == [_sums(one, False) for one in running.orders]


def test_equal_searches_find_equal_plans_in_any_process() -> None:
    step = NextStep(replace(SPEC, num_chunks=2, schedule="interleaved_1f1b"), drawn(12), Measured(weight=0.5), True)
    found = plan_ahead(step)
    assert ahead.step_of(json.loads(json.dumps(ahead.question_of(step)))) == step
    assert ahead.found_in(json.loads(json.dumps(ahead.answer_of(found)))) == found
    planner = ahead.Planner("a step")
    planner.ask(3, step)
    assert planner.answer(3) == found


def test_measured_times_of_the_stages_count() -> None:
    costs = (1.0, 4.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0)
    slow = plan_ahead(NextStep(SPEC, costs, Measured(forward=(1.0, 1.0, 1.0, 4.0)), True))
    assert slow.proposal is not None
    assert slow.proposal.spec.measured is not None
    assert slow.proposal.spec.measured.forward == (1.0, 1.0, 1.0, 4.0)


def test_equal_microbatches_keep_their_plan() -> None:
    assert plan_ahead(NextStep(SPEC, (2.0,) * 12)) == StepAhead(tuple(range(12)), kept="all microbatches cost the same")


def test_costs_of_other_microbatches_are_an_error_which_the_rank_raises() -> None:
    step = NextStep(SPEC, (1.0, 2.0))
    with pytest.raises(PlanError, match="2 costs are given for 12 microbatches"):
        plan_ahead(step)
    planner = ahead.Planner("a step")
    planner.ask(3, step)
    with pytest.raises(PipelineError, match="could not be planned: PlanError: 2 costs are given"):
        planner.answer(3)


def test_an_order_is_the_best_that_was_seen() -> None:
    """Any swap can lower this estimate."""
    given = drawn(8)

    def inversions(order: tuple[int, ...]) -> float:
        return sum(order[a] > order[b] for a in range(8) for b in range(a, 8))

    assert shortest_order(given, inversions, 5) == tuple(range(8))
    assert shortest_order(given, lambda order: -inversions(order), 400) == tuple(range(7, -1, -1))
    ends = shortest_order(given, lambda order: -inversions(order), 400, lambda share: True)
    assert inversions(ends) < 28, "no trial was left"
