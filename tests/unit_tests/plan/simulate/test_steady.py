"""Steps in a row without a barrier between them."""

from __future__ import annotations

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.simulate.steady import counts_on_bypass, in_a_row, longest_span, steady_step
from megatron_pp.plan.verify.rendezvous import check_rendezvous

NAMES = [name for name, family in SCHEDULES.items() if family.search is None]


def plan_of(name, size=4, microbatches=12):
    return build_plan(PlanSpec(name, size, SCHEDULES[name].chunks or 2, microbatches))


def unit_costs(plan):
    """F = B = W = 1 for a rank's share of the model."""
    return StageCosts.uniform(plan.spec.pipeline_size).regrouped(plan.placement.num_stages)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_the_papers_zero_bubble_is_that_of_steps_in_a_row(name, size):
    """arXiv 2401.10241, sections 2.2, 4 and 6: no bubble with the bypass; without it P - 1 forwards of zb_h2's step."""
    microbatches = 3 * size
    plan = plan_of(name, size, microbatches)
    alone, steady = simulate(plan, unit_costs(plan)), steady_step(plan, unit_costs(plan))
    assert (steady.period, steady.bubble_share) == (3 * microbatches, 0.0)
    assert counts_on_bypass(alone)
    assert longest_span(alone) == 3 * microbatches
    assert alone.makespan == 3 * microbatches + (size - 1) * (1 if name == "zb_h2" else 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("latency", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_gains_by_the_bypass_where_it_counts_on_it(name, latency):
    plan, network = plan_of(name), Network(link=Link(latency))
    alone, steady = simulate(plan, unit_costs(plan), network), steady_step(plan, unit_costs(plan), network)
    assert steady.busy == pytest.approx(alone.busy)
    assert steady.period <= alone.makespan * (1 + 1e-9)
    assert counts_on_bypass(alone) == (steady.period < alone.makespan * (1 - 1e-9))


def test_the_period_is_found_where_the_first_steps_are_not_steady():
    """Two ranks at different speeds: the slow one sets the pace, once the fast one's lead is used up."""
    plan = plan_of("zb_h2", 2, 3)
    costs = StageCosts.per_stage((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    steady = steady_step(plan, costs)
    many = simulate(in_a_row(plan, 40), costs).makespan - simulate(in_a_row(plan, 20), costs).makespan
    assert steady.period == pytest.approx(many / 20)
    assert steady.period < simulate(plan, costs).makespan


def test_messages_of_steps_in_a_row_do_not_cross():
    plan = in_a_row(plan_of("zb_v", 2, 4), 3)
    assert {at.mb for order in plan.orders for at in order} == set(range(plan.spec.num_microbatches)) == set(range(12))
    check_rendezvous(plan, ())
