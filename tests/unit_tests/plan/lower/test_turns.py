"""Turns: the order by which receives are posted where any instruction may wait, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_pp.plan.builder import build_plan, lowered_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.ir.spec import ANY_WAIT, ONE_QUEUE, PlanSpec
from megatron_pp.plan.lower.clock import run_clock
from megatron_pp.plan.lower.turns import Turns
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.simulator import simulate

SAFE = (ONE_QUEUE, ANY_WAIT)
UNEQUAL = Measured(forward=2.8, backward_input=0.78, weight=0.63, transfer=0.1)
UNEVEN = Measured(
    forward=(0.4, 3.1, 0.9, 1.7),
    backward_input=(2.2, 0.5, 1.4, 0.6),
    weight=(0.3, 1.9, 0.7, 2.6),
    transfer=0.3,
    microbatches=(1.0, 3.0, 0.5, 2.0, 1.0, 0.25, 1.5, 1.0),
)


def step(spec: PlanSpec, measured: Measured) -> float:
    """The simulated step of the plan that is searched for ``measured``."""
    plan = build_plan(replace(spec, measured=measured))
    return simulate(plan, measured.costs(plan.placement.num_stages), measured.network()).makespan


@pytest.mark.parametrize("measured", [UNEQUAL, UNEVEN], ids=["unequal", "uneven"])
@pytest.mark.parametrize(("schedule", "size", "chunks"), [("auto", 4, 1), ("auto", 2, 2), ("auto_v", 2, 2)])
def test_a_searched_plan_is_posted_by_the_times_it_was_searched_for(
    schedule: str, size: int, chunks: int, measured: Measured
) -> None:
    usual = step(PlanSpec(schedule, size, chunks, 8), measured)
    assert step(PlanSpec(schedule, size, chunks, 8, device=SAFE), measured) <= 1.001 * usual


@pytest.mark.parametrize(
    "measured",
    [
        UNEQUAL,
        UNEVEN,
        Measured(forward=0.0, backward_input=0.0, weight=0.0),
        Measured(forward=1e-18, backward_input=1e18, weight=0.0),
        Measured(forward=0.0, backward_input=0.0, weight=0.0, backward=0.0, transfer=5.0),
    ],
    ids=["unequal", "uneven", "all free", "far apart", "transfers alone"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_turns_grow_along_ranks_and_from_each_operation_to_those_that_need_it(
    schedule: str, measured: Measured
) -> None:
    spec = PlanSpec(schedule, 4, 1, 8)
    placement = lowered_plan(spec).placement
    clocked = run_clock([list(order) for order in SCHEDULES[schedule].orders(spec.shape)], placement)
    turns = Turns(clocked, placement, True, measured)
    for rank in turns.of_rank:
        assert all(one < other for one, other in pairwise(rank))
    made = {
        (at.op, placement.stages[rank][at.chunk], at.mb): turn
        for rank, order in enumerate(clocked.orders)
        for at, turn in zip(order, turns.of_rank[rank], strict=True)
    }
    for mb in range(8):
        for stage in range(3):
            assert made["F", stage, mb] < made["F", stage + 1, mb]
            gradient = made.get(("I", stage + 1, mb), made.get(("B", stage + 1, mb)))
            needs = made.get(("I", stage, mb), made.get(("B", stage, mb)))
            assert gradient is not None
            assert needs is not None
            assert gradient < needs, (stage, mb)
