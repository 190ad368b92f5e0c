"""Overlapped forward-backward pairs: which operations pair, and that nothing stands between them."""

from __future__ import annotations

import itertools

import pytest

from megatron_pp.plan.build import build_plan, lowered_plan
from megatron_pp.plan.clock import logical_ends
from megatron_pp.plan.instruction import COMPUTE_OPS, parse_program
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.pairs import is_pair, overlap_pairs
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.sim.costs import StageCosts
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.spec import CHANNELS, EXPLICIT, HOOKS, POLICIES, Plan, PlanSpec
from megatron_pp.plan.verify import verify


def adjacent_pairs(plan: Plan) -> int:
    count = 0
    for program, order in zip(plan.programs, plan.orders, strict=True):
        split = {(i.chunk, i.mb) for i in order if i.op == "W"}
        count += sum(is_pair(one, two, split) for one, two in itertools.pairwise(program))
    return count


def pairs_in_orders(plan: Plan) -> int:
    return sum(map(len, overlap_pairs(plan.orders)))


def test_what_pairs() -> None:
    order = parse_program("F0.0 B0.0 F0.1 B1.0 W1.0 F1.2 B0.1 F0.3 F0.4")
    assert overlap_pairs([order]) == [{5}]  # the same microbatch does not pair, nor does a split backward


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipe_v_runs_its_overlapped_phases_as_pairs(size: int, more: int) -> None:
    microbatches = 2 * size + more
    plan = build_plan(PlanSpec("dualpipe_v", size, 2, microbatches, overlap_pairs=True))
    per_rank = [2 * (microbatches - 2 * size + rank + 1) + (size - rank - 1) for rank in range(size)]
    assert [len(p) for p in overlap_pairs(plan.orders)] == per_rank
    assert adjacent_pairs(plan) == sum(per_rank)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_bubble_of_paired_dualpipe_v_is_the_published_one(size: int) -> None:
    """(P-1)(F&B + B_full - 3W), where a pair takes F + B_full = 3: two units for each rank but one."""
    plan = build_plan(PlanSpec("dualpipe_v", size, 2, 4 * size, overlap_pairs=True))
    assert simulate(plan, StageCosts.uniform(2 * size)).idle == (2.0 * (size - 1),) * size


@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if family.search is None])
def test_paired_plans_of_every_family_are_accepted(name: str) -> None:
    chunks = SCHEDULES[name].chunks or 2
    for size, m, sync in ((1, 3, HOOKS), (2, 5, EXPLICIT), (4, 4, HOOKS), (4, 9, EXPLICIT), (8, 16, HOOKS)):
        for policy, channels, variable in itertools.product(POLICIES, CHANNELS, (False, True)):
            spec = PlanSpec(
                name,
                size,
                chunks,
                m,
                policy=policy,
                channels=channels,
                variable_shapes=variable,
                grad_sync=sync,
                overlap_pairs=True,
            )
            verify(lowered_plan(spec))


def test_without_the_wish_nothing_is_paired() -> None:
    spec = PlanSpec("1f1b", 4, 1, 8)
    assert adjacent_pairs(build_plan(spec)) < pairs_in_orders(build_plan(spec))


def test_a_pair_that_would_wait_in_a_circle_is_taken_apart() -> None:
    """Rank 2 waits for F.1 of rank 1, which would only run it together with B.0, for which it waits for rank 2."""
    orders = [parse_program(line) for line in ("F0.0 F0.1 B0.0 B0.1", "F0.0 F0.1 B0.0 B0.1", "F0.0 F0.1 B0.0 B0.1")]
    pairs = overlap_pairs(orders)
    assert pairs == [{1}, {1}, {1}]
    logical_ends(orders, Placement("loop", 3, 1), 2, pairs)
    assert pairs == [set(), set(), {1}]


def test_the_halves_of_a_pair_end_together() -> None:
    orders = [parse_program("F0.0 F0.1 B0.0 B0.1")]
    pairs = overlap_pairs(orders)
    assert logical_ends(orders, Placement("loop", 1, 1), 2, pairs) == [[1, 3, 3, 4]]


def test_posts_stand_before_and_after_a_pair() -> None:
    plan = build_plan(PlanSpec("dualpipe_v", 4, 2, 12, overlap_pairs=True))
    for program in plan.programs:
        compute = [k for k, i in enumerate(program) if i.op in COMPUTE_OPS]
        for k, following in itertools.pairwise(compute):
            one, two = program[k], program[following]
            if one.op == "F" and two.op == "B" and following == k + 1 and following + 1 < len(program):
                sends = {(i.op, i.chunk, i.mb) for i in program[following + 1 : following + 12]}
                last_stage = plan.placement.num_stages - 1
                rank = plan.programs.index(program)
                stage = plan.placement.stages[rank][one.chunk]
                if stage < last_stage and plan.placement.crosses_ranks(stage):
                    assert ("SEND_F", one.chunk, one.mb) in sends
