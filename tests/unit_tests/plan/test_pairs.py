"""Overlapped forward-backward pairs: which operations pair, and that nothing stands between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from megatron_pp.plan.builder import build_plan, lowered_plan
from megatron_pp.plan.clock import run_clock
from megatron_pp.plan.costs import StageCosts
from megatron_pp.plan.dataflow import consumer_of
from megatron_pp.plan.instruction import PAIR, Instruction, format_program, pair_up, parse_program
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.spec import CHANNELS, EXPLICIT, HOOKS, POLICIES, PlanSpec
from megatron_pp.plan.verifier import verify
from tests.harness.plan_text import placed


def pairs_in(program: Sequence[Instruction]) -> int:
    return sum(at.op == PAIR for at in program)


def test_what_pairs() -> None:
    order = parse_program("F0.0 B0.0 F0.1 I1.0 W1.0 F1.2 B0.1 F0.3 F0.4")
    # The same microbatch does not pair, nor does a split backward.
    assert format_program(pair_up(order)) == "F0.0 B0.0 F0.1 I1.0 W1.0 (F1.2 B0.1) F0.3 F0.4"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipe_v_runs_its_overlapped_phases_as_pairs(size: int, more: int) -> None:
    microbatches = 2 * size + more
    plan = build_plan(PlanSpec("dualpipe_v", size, 2, microbatches, overlap_pairs=True))
    per_rank = [2 * (microbatches - 2 * size + rank + 1) + (size - rank - 1) for rank in range(size)]
    assert [pairs_in(program) for program in plan.programs] == per_rank


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_bubble_of_paired_dualpipe_v_is_the_published_one(size: int) -> None:
    """(P-1)(F&B + B_full - 3W), where a pair takes F + B_full = 3: two units for each rank but one."""
    plan = build_plan(PlanSpec("dualpipe_v", size, 2, 4 * size, overlap_pairs=True))
    assert simulate(plan, StageCosts.uniform(2 * size)).idle == (2.0 * (size - 1),) * size


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if family.search is None])
def test_paired_plans_of_every_family_are_accepted(name: str) -> None:
    """Under every policy, with the four choices of channels and shapes in turn."""
    chunks = SCHEDULES[name].chunks or 2
    choices = list(itertools.product(CHANNELS, (False, True)))
    sizes = ((1, 3, HOOKS), (2, 5, EXPLICIT), (3, 7, HOOKS), (4, 4, HOOKS), (4, 9, EXPLICIT), (8, 16, HOOKS))
    for turn, (size, m, sync) in enumerate(sizes):
        for number, policy in enumerate(POLICIES):
            channels, variable = choices[(turn + number) % len(choices)]
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


def test_nothing_is_paired_unless_it_is_asked_for() -> None:
    plan = build_plan(PlanSpec("1f1b", 4, 1, 8))
    assert sum(map(pairs_in, plan.programs)) == 0
    assert sum(pairs_in(pair_up(order)) for order in plan.orders) > 0


def test_a_pair_that_would_wait_in_a_circle_is_taken_apart() -> None:
    """Rank 2 waits for F.1 of rank 1, which would only run it together with B.0, for which it waits for rank 2."""
    placement = Placement("loop", 3, 1)
    orders = [pair_up(placed(placement, rank, "F0.0 F0.1 B0.0 B0.1")) for rank in range(3)]
    assert [pairs_in(order) for order in orders] == [1, 1, 1]
    assert [pairs_in(order) for order in run_clock(orders, placement).orders] == [0, 0, 1]


def test_the_halves_of_a_pair_end_together() -> None:
    placement = Placement("loop", 1, 1)
    order = pair_up(placed(placement, 0, "F0.0 F0.1 B0.0 B0.1"))
    assert run_clock([order], placement).ends == [[1, 3, 4]]


def test_posts_stand_before_and_after_a_pair() -> None:
    plan = build_plan(PlanSpec("dualpipe_v", 4, 2, 12, overlap_pairs=True))
    for program in plan.programs:
        for k, entry in enumerate(program[:-1]):
            if entry.op == PAIR:
                forward = entry.members[0]
                sends = {at[:3] for at in program[k + 1 : k + 12]}
                if consumer_of("F", forward.stage, 8) is not None and plan.placement.crosses_ranks(forward.stage):
                    assert ("SEND_F", forward.stage, forward.mb) in sends
