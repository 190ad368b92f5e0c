"""The time of a step is extrapolated from two shorter steps."""

from __future__ import annotations

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.planner.timing import order_time
from megatron_pp.tools.advise.pilots import PILOTS, continued


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_the_steady_state_goes_on_by_both_clocks(schedule: str, transfer: float) -> None:
    size, count = 4, 40
    costs, network = StageCosts.uniform(size), Network(link=Link(transfer))
    few, many = (pilot * size for pilot in PILOTS)
    plans = {number: build_plan(PlanSpec(schedule, size, 1, number)) for number in (few, many, count)}
    simulated = {number: simulate(plan, costs, network).makespan for number, plan in plans.items()}
    timed = {number: order_time(plan.orders, plan.placement, costs, transfer) for number, plan in plans.items()}
    for found in (simulated, timed):
        assert continued(found[few], found[many], few, many, count) == pytest.approx(found[count])


def test_a_step_of_fewer_microbatches_is_itself_the_pilot() -> None:
    assert continued(3.0, 5.0, 8, 8, 8) == 5.0
