"""The exact solver, against optima that are known."""

import random
import sys

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import Link, MemoryModel, Network, StageCosts
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders.list_scheduler import Problem
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner import auto
from megatron_pp.planner.bound import lower_bound
from megatron_pp.planner.exact import optimum
from megatron_pp.planner.plan_search import peak_memory
from tests.unit_tests.planner.test_bound import TIGHT


def problem(kind, size, chunks, m, room, costs=None, transfer=0.0):
    placement = Placement(kind, size, chunks)
    memory = MemoryModel.in_chunks(placement, room)
    return Problem(placement, m, memory, costs or StageCosts.uniform(placement.num_stages), transfer)


def solve(case, most):
    pytest.importorskip("ortools", reason="the exact solver needs OR-tools, the extra solver")
    return optimum(case, most)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (problem(LOOP, 1, 1, 3, 1.0), 9),
        (problem(LOOP, 3, 1, 4, 3.0), 2 + 3 * 4),  # ZB-H1's memory
        (problem(LOOP, 2, 1, 3, 1.0), 3 * 5),  # F, F and I of the other rank, I and W, one microbatch at a time
        (problem(LOOP, 2, 1, 2, 9.0, transfer=5.0), 20),  # the second gradient leaves when the first is there
        (problem(V_SHAPE, 2, 2, 4, 4.0), 6 * 4 + 1),
    ],
    ids=["one rank", "ZB-H1", "one microbatch at a time", "slow transfers", "V"],
)
def test_it_finds_and_proves_the_optimum(case, step):
    found = solve(case, 60.0)
    assert (found.step, found.is_proven) == (step, True)
    rows = zip(found.orders, case.placement.stages, case.memory.limits, strict=True)
    assert all(peak_memory(order, stages, case.memory) <= limit for order, stages, limit in rows)


def test_no_optimum_is_below_the_bound_and_its_orders_run_as_fast_as_it_says():
    rng, proven = random.Random(7), 0
    for _ in range(24):
        kind, size, chunks = rng.choice([(LOOP, 1, 2), (LOOP, 2, 1), (LOOP, 3, 1), (V_SHAPE, 2, 2), (LOOP, 2, 2)])
        placement = Placement(kind, size, chunks)
        stages = range(placement.num_stages)
        costs = StageCosts.per_stage(*([rng.randint(1, 3) for _ in stages] for _ in range(3)))
        kept = tuple(rng.choice([1.0, 2.0, 3.0]) for _ in stages)
        late = tuple(rng.choice([0.0, 0.5, 1.0]) * one for one in kept)
        room = tuple(rng.choice([1.0, 1.25, 1.5, 2.0]) * sum(kept[s] for s in row) for row in placement.stages)
        case = Problem(placement, rng.randint(2, 4), MemoryModel(room, kept, late), costs, rng.choice([0.0, 0.5]))
        found = solve(case, 200.0)
        network = Network(link=Link(case.transfer))
        bound = lower_bound(placement, case.num_microbatches, costs, network, case.memory)
        assert bound.step <= found.step * (1 + 1e-9), (case, bound)
        proven += found.is_proven
        if not case.transfer and found.orders:
            plan = lowered(PlanSpec("auto", size, chunks, case.num_microbatches), placement, found.orders)
            verify(plan)
            assert simulate(plan, costs).makespan == pytest.approx(found.step)
    assert proven


@pytest.mark.parametrize(("placement", "memory", "step"), TIGHT.values(), ids=TIGHT)
def test_the_bound_of_a_tight_memory_is_reached(placement, memory, step):
    assert solve(Problem(placement, 3, memory, StageCosts.uniform(placement.num_stages)), 60.0).step == step


def test_a_step_that_cannot_be_is_refused():
    found = solve(problem(LOOP, 2, 1, 2, 9.0), 6.0)
    assert (found.step, found.bound, found.orders) == (float("inf"), float("inf"), ())


def test_the_search_finds_the_optimum_of_a_small_uneven_case():
    measured = Measured((0.85, 1.3, 0.6), (0.9, 1.4, 0.55), (0.7, 1.0, 0.5), transfer=0.3, memory_limit=2.5)
    best = auto.found(PlanSpec("auto", 3, 1, 5, measured=measured)).best
    placement = best.plan.placement
    case = Problem(placement, 5, measured.memory(placement), measured.costs(3), measured.transfer)
    assert best.makespan <= 1.02 * solve(case, best.makespan).step


def test_without_or_tools_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlanError, match=r"the exact solver needs OR-tools: pip install '\.\[solver\]'"):
        optimum(problem(LOOP, 1, 1, 1, 1.0), 9.0)
