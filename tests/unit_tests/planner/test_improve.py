"""Local search on compute orders, and orders in which no microbatch waits."""

import random

import pytest

from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.costs.stage_costs import Link, MemoryModel, Network, StageCosts
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.list_scheduler import Problem, Scheduled
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner.bound import lower_bound
from megatron_pp.planner.improve import improved
from megatron_pp.planner.no_wait import no_wait
from megatron_pp.planner.plan_search import peak_memory


def start(name, size, chunks, m, costs=None):
    """The problem of a named plan, with the plan's own memory as the limit, and the plan's orders and step."""
    plan = lowered_plan(PlanSpec(name, size, chunks, m))
    stages = plan.placement.num_stages
    costs, ones = costs or StageCosts.uniform(stages), (1.0,) * stages
    free = MemoryModel((), ones, (0.9,) * stages)
    limits = tuple(peak_memory(order, plan.placement.stages[r], free) for r, order in enumerate(plan.orders))
    problem = Problem(plan.placement, m, MemoryModel(limits, ones, free.weight), costs)
    return plan, problem, Scheduled([list(order) for order in plan.orders], simulate(plan, costs).makespan)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "v_min", "gpipe"])
def test_an_improved_order_runs_in_its_stated_time_within_the_memory_limit(name):
    rng = random.Random(name)
    chunks = SCHEDULES[name].chunks or 2
    times = [tuple(rng.uniform(0.5, 1.5) for _ in range(3 * chunks)) for _ in range(3)]
    plan, problem, found = start(name, 3, chunks, 5, StageCosts.per_stage(*times))
    results = improved(problem, found, 0.0, 60_000, 4)
    assert [r.makespan for r in results] == sorted(r.makespan for r in results)
    assert results[0].makespan <= found.makespan
    assert len({str(r.orders) for r in results}) == len(results)
    for result in results:
        again = lowered(plan.spec, plan.placement, result.orders)
        verify(again)
        assert simulate(again, problem.costs).makespan == pytest.approx(result.makespan)
        for rank, order in enumerate(result.orders):
            assert peak_memory(order, plan.placement.stages[rank], problem.memory) <= problem.memory.limits[rank] + 1e-6


def test_the_improvement_reaches_the_bound_from_a_poor_order():
    """ZB-H1 is the best plan in its memory. GPipe's order with all W at the end is much longer than its memory
    allows."""
    plan, problem, found = start("zb_h1", 3, 1, 6)
    poor = [[at for op in "FIW" for at in order if at.op == op] for order in found.orders]
    free = Problem(plan.placement, 6, MemoryModel((9.0,) * 3, (1.0,) * 3, (1.0,) * 3), problem.costs)
    least = lower_bound(plan.placement, 6, problem.costs).step
    slow = simulate(lowered(plan.spec, plan.placement, poor), problem.costs).makespan
    (best,) = improved(free, Scheduled(poor, slow), least, 100_000)
    assert slow > best.makespan == least == 2 + 3 * 6


def test_the_improvement_is_deterministic_and_stops_at_the_bound():
    _, problem, found = start("v_min", 4, 2, 6)
    assert improved(problem, found, 0.0, 40_000, 3) == improved(problem, found, 0.0, 40_000, 3)
    (kept,) = improved(problem, found, found.makespan, 40_000)
    assert str(kept.orders) == str(found.orders)


def test_messages_of_a_channel_take_turns():
    """Outputs are sent at 0.5, 1 and 1.5 and arrive at 2.5, 4.5 and 6.5. Gradients are sent from 8 on and arrive at 10,
    12 and 14; then the last backward takes 1.
    """
    plan = lowered_plan(PlanSpec("gpipe", 2, 1, 3))
    memory, costs = MemoryModel((9.0,) * 2, (1.0,) * 2, (1.0,) * 2), StageCosts.uniform(2, 0.5, 0.5, 0.5)
    problem = Problem(plan.placement, 3, memory, costs, transfer=2.0)
    (result,) = improved(problem, Scheduled([list(order) for order in plan.orders], 99.0), 99.0, 1)
    assert result.makespan == 15


def test_orders_without_waits_run_as_planned_within_the_memory_limit():
    rng = random.Random(2)
    for _ in range(20):
        size, count = rng.randint(1, 5), rng.randint(1, 9)
        placement = Placement(LOOP, size, 1)
        costs = StageCosts.per_stage(
            *([rng.choice([1.0, rng.uniform(0.1, 2.0)]) for _ in range(size)] for _ in range(3))
        )
        kept = tuple(rng.choice([1.0, rng.random()]) for _ in range(size))
        late = tuple(rng.choice([0.0, 0.5, 1.0]) * one for one in kept)
        limits = tuple(rng.uniform(1.0, 3.0) * one for one in kept)
        case = Problem(placement, count, MemoryModel(limits, kept, late), costs, rng.choice([0.0, 0.3]))
        found = no_wait(case)
        assert found is not None
        rows = zip(found.orders, placement.stages, limits, strict=True)
        assert all(peak_memory(order, stages, case.memory) <= limit * (1 + 1e-9) for order, stages, limit in rows)
        network = Network(link=Link(case.transfer))
        assert lower_bound(placement, count, costs, network, case.memory).step <= found.makespan * (1 + 1e-9)
        assert improved(case, found, found.makespan, 0)[0].makespan <= found.makespan * (1 + 1e-9)  # on the clock


def test_half_the_memory_of_16_ranks_is_used_better_than_by_any_other_pattern():
    """Microbatches that start 4.4 apart never need a rank at the same time: a forward, a backward and two transfers
    take
    2.2."""
    placement, costs = Placement(LOOP, 16, 1), StageCosts.uniform(16)
    memory = MemoryModel.in_chunks(placement, 8.0)
    found = no_wait(Problem(placement, 64, memory, costs, 0.1))
    assert found is not None
    assert found.makespan == pytest.approx(326.8)
    assert found.makespan < 1.06 * lower_bound(placement, 64, costs, Network(link=Link(0.1)), memory).step
