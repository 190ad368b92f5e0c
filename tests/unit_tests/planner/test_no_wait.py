"""Orders in which no microbatch waits."""

import random

import pytest

from megatron_pp.plan.costs.stage_costs import Link, MemoryModel, Network, StageCosts
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.orders.list_scheduler import Problem
from megatron_pp.planner.bound import lower_bound
from megatron_pp.planner.improve import improved
from megatron_pp.planner.no_wait import no_wait
from megatron_pp.planner.plan_search import peak_memory


def test_they_run_as_planned_and_within_the_memory():
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
    """Microbatches 4.4 apart meet on no rank, as a forward, a backward and two transfers take 2.2."""
    placement, costs = Placement(LOOP, 16, 1), StageCosts.uniform(16)
    memory = MemoryModel.in_chunks(placement, 8.0)
    found = no_wait(Problem(placement, 64, memory, costs, 0.1))
    assert found is not None
    assert found.makespan == pytest.approx(326.8)
    assert found.makespan < 1.06 * lower_bound(placement, 64, costs, Network(link=Link(0.1)), memory).step
