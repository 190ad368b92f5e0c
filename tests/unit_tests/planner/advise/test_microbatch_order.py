"""The order of microbatches that cost different times."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.simulate.steady import steady_step
from megatron_pp.planner.advise.microbatch_order import best_order
from megatron_pp.planner.advise.model import PART, Model, layer
from megatron_pp.planner.advise.pipeline_search import search
from megatron_pp.planner.advise.question import Question
from megatron_pp.planner.bound import lower_bound

COSTS = (2.0, 0.25, 1.75, 0.5, 0.5, 1.0)


def test_an_operation_takes_its_microbatchs_time():
    plan = build_plan(PlanSpec("1f1b", 2, 1, 3))
    costs = StageCosts.uniform(2)
    result = simulate(plan, replace(costs, microbatches=(1.0, 2.0, 4.0)))
    took = {(e.instruction.op, e.instruction.mb): e.end - e.start for e in result.events(0) if e.end > e.start}
    assert [took["F", mb] for mb in range(3)] == [1.0, 2.0, 4.0]
    assert [took["B", mb] for mb in range(3)] == [2.0, 4.0, 8.0]
    assert result.busy == (21.0, 21.0)
    assert simulate(plan, replace(costs, microbatches=(1.0,) * 3)).makespan == simulate(plan, costs).makespan
    pairs = build_plan(PlanSpec("1f1b", 2, 1, 3, overlap_pairs=True))
    assert simulate(pairs, replace(costs, microbatches=(1.0, 2.0, 4.0))).busy == (21.0, 21.0)


def test_steps_in_a_row_have_them_again_in_each():
    plan = build_plan(PlanSpec("zb_h2", 2, 1, 4))
    found = steady_step(plan, replace(StageCosts.uniform(2), microbatches=(1.0, 2.0, 1.0, 2.0)))
    assert found.busy == pytest.approx((18.0, 18.0))


@pytest.mark.parametrize(
    ("costs", "words"),
    [((1.0, 2.0), "for 2 microbatches; the plan has 3"), ((1.0, 0.0, 1.0), "microbatch 1 costs 0.0")],
)
def test_wrong_costs(costs, words):
    with pytest.raises(PlanError) as error:
        simulate(build_plan(PlanSpec("1f1b", 2, 1, 3)), replace(StageCosts.uniform(2), microbatches=costs))
    assert words in str(error.value)


def test_a_bound_is_for_equal_ones():
    plan = build_plan(PlanSpec("1f1b", 2, 1, 3))
    with pytest.raises(PlanError, match=r"leave StageCosts\.microbatches out"):
        lower_bound(plan.placement, 3, replace(StageCosts.uniform(2), microbatches=(1.0, 2.0, 3.0)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_order_is_nearly_the_best_of_all(schedule):
    model = Model((layer(PART, 2.0, 2.0, 2.0, 1.0),))
    asked = Question(2, 6, 80.0, ((1, model),), schedules=(schedule,), policies=("overlap",), microbatch_costs=COSTS)
    best = search(asked).best
    found = best_order(asked, best, 5.0)
    plan = build_plan(best.spec)
    steps = {
        order: simulate(plan, replace(best.fit.costs, microbatches=order)).makespan
        for order in set(itertools.permutations(COSTS))
    }
    assert found.step == steps[tuple(COSTS[k] for k in found.order)]
    assert found.step_as_given == steps[COSTS]
    assert min(steps.values()) <= found.step <= 1.01 * min(steps.values())
    assert found.step < 0.95 * found.step_as_given


def test_without_costs_there_is_no_order():
    model = Model((layer(PART, 2.0, 2.0, 2.0, 1.0),))
    asked = Question(2, 4, 80.0, ((1, model),), schedules=("1f1b",))
    assert best_order(asked, search(asked).best, 1.0) is None
    with pytest.raises(PlanError, match="costs of 3 microbatches are given; a step has 4"):
        replace(asked, microbatch_costs=(1.0, 1.0, 1.0))
