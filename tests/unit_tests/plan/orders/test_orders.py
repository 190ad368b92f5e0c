"""Compute orders of every schedule family: legal for any shape, and as the papers say in bubble, memory and rule."""

from __future__ import annotations

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Shape
from megatron_pp.plan.orders.v import one_f_one_b_v_offsets, pattern_slots, v_half_offsets, v_min_offsets
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate

SIZES = (1, 2, 3, 4, 8)


def unit_simulation(name: str, size: int, microbatches: int, **fields: object) -> Simulation:
    """f = b = w = 1 for a chunk, where a rank has two chunks' worth of work; transfers are free."""
    chunks = SCHEDULES[name].chunks or 2
    work = 2 / chunks
    plan = build_plan(PlanSpec(name, size, chunks, microbatches, **fields))
    return simulate(plan, StageCosts.uniform(size * chunks, work, work, work))


def peak(name: str, size: int, microbatches: int) -> int:
    return max(unit_simulation(name, size, microbatches).peak_in_flight())


def test_families_that_split_every_backward() -> None:
    for name in ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min"):
        for order in SCHEDULES[name].orders(Shape(4, SCHEDULES[name].chunks or 2, 9, 4)):
            kinds = [i.op for i in order]
            assert kinds.count("W") == kinds.count("I") == kinds.count("F")


# Idle chunk units of each rank, where F = B = W = 2 of them: the published formulas, or what 8 ranks have.
BUBBLES = {
    **dict.fromkeys(("gpipe", "1f1b", "eager_1f1b"), lambda p: 6 * (p - 1)),
    **dict.fromkeys(("interleaved_1f1b", "breadth_first"), lambda p: 3 * (p - 1)),
    **dict.fromkeys(("zb_h1", "zb_h2"), lambda p: 2 * (p - 1)),  # (P-1)(F+B-W)
    **dict.fromkeys(("interleaved_zb", "zb_v", "dualpipe_v"), lambda p: p - 1),
    "v_min": {8: 27}.get,
    "v_half": {8: 17}.get,
    "1f1b_v": {8: 43}.get,
}


@pytest.mark.parametrize("name", BUBBLES)
def test_bubbles_equal_the_published_ones(name: str) -> None:
    for size, microbatches in ((2, 8), (3, 12), (4, 16), (5, 20), (8, 16), (8, 32)):
        idle = BUBBLES[name](size)
        assert idle is None or unit_simulation(name, size, microbatches).idle == (idle,) * size


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 17])
def test_peaks_of_memory_are_those_of_the_papers(size: int, microbatches: int) -> None:
    """In microbatches for one chunk a rank, in chunks for two; never more than there are."""
    most = {
        "gpipe": microbatches,
        "1f1b": size,
        "eager_1f1b": 2 * size - 1,
        "zb_h1": size,
        "zb_h2": 2 * size - 1,
        "zb_v": 2 * size,
        "v_half": 2 * ((size + 2) // 2),
        "v_min": 2 * ((size + 4) // 3),
        "1f1b_v": 2 * ((2 * size + 3) // 3),
        "dualpipe_v": 2 * size + 1,
    }
    for name, formula in most.items():
        there_are = microbatches * (SCHEDULES[name].chunks or 1)
        found = peak(name, size, microbatches)
        assert found <= min(formula, there_are), name
        if microbatches >= 2 * size and size > 2:
            assert found == formula, name


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_zb_v_leaves_few_gaps_in_short_steps(size: int) -> None:
    """A single microbatch takes 4 P + 1, and P microbatches, which take 6 P of each rank, P - 1 more."""
    assert unit_simulation("zb_v", size, 1).makespan == 4 * size + 1
    assert unit_simulation("zb_v", size, size).makespan == 7 * size - 1


def test_interleaved_zero_bubble_needs_no_more_memory_than_interleaved() -> None:
    for size, m in ((2, 8), (4, 8), (4, 13), (8, 16)):
        assert peak("interleaved_zb", size, m) == peak("interleaved_1f1b", size, m)


@pytest.mark.parametrize(
    ("name", "group", "chunks_kept", "more_bubble"),
    [("interleaved_1f1b", 0, 39, 0), ("gis", 0, 32, 0), ("gis", 4, 20, 12), ("gis_h", 0, 20, 12), ("gis_h", 4, 20, 12)],
)
def test_generalised_interleaved_schedules_keep_what_their_paper_says(
    name: str, group: int, chunks_kept: int, more_bubble: int
) -> None:
    """Table 1 of arXiv 2503.01328 for 8 ranks and 4 chunks: d v + d - 1, d v and g (v - 1) + d chunks; a bubble of
    (d - 1)(F + B), and with groups of g < d of (d - g)(v - 1)(F + B) more.
    """
    plan = build_plan(PlanSpec(name, 8, 4, 32, group))
    simulation = simulate(plan, StageCosts.uniform(32, 1.0, 0.5, 0.5))
    assert max(simulation.peak_in_flight()) == chunks_kept
    assert simulation.makespan == 2 * (32 * 4 + 7 + more_bubble)


@pytest.mark.parametrize(("name", "group"), [("gis", 0), ("interleaved_1f1b", 16)])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_a_message_that_is_used_late_holds_up_no_sender(name: str, group: int, backward: float) -> None:
    """The receive is posted late, and still only the bubble of interleaved 1F1B is left."""
    plan = build_plan(PlanSpec(name, 8, 4, 48, group))
    simulation = simulate(plan, StageCosts.uniform(32, 1.0, backward / 2, backward / 2))
    assert simulation.makespan == (1 + backward) * (48 * 4 + 7)


@pytest.mark.parametrize("offsets", [v_half_offsets, v_min_offsets, one_f_one_b_v_offsets])
@pytest.mark.parametrize("size", range(1, 25))
def test_repeated_patterns_never_collide_with_themselves(offsets: object, size: int) -> None:
    long_backward = offsets is one_f_one_b_v_offsets
    for rank in range(size):
        slots = pattern_slots(offsets(size, rank), microbatches=1)  # type: ignore[operator]
        taken = [slot % 6 for slot in slots.values()]
        if long_backward:
            taken += [(slot + 1) % 6 for (op, _, _), slot in slots.items() if op == "B"]
        assert len(set(taken)) == len(taken)


def test_eager_1f1b_hides_transfers_that_1f1b_waits_for() -> None:
    """Each transfer takes half a forward: 1F1B pays once a microbatch, eager 1F1B only while filling and draining."""
    from megatron_pp.plan.costs.stage_costs import Link, Network

    network = Network(link=Link(latency=0.5))
    spans = {}
    for name in ("1f1b", "eager_1f1b"):
        plan = build_plan(PlanSpec(name, 4, 1, 16))
        spans[name] = simulate(plan, StageCosts.uniform(4), network).makespan
    assert spans["eager_1f1b"] == 3 * (16 + 3) + 2 * 3 * 0.5
    assert spans["1f1b"] > spans["eager_1f1b"] + 10


@pytest.mark.parametrize("size", SIZES)
def test_dualpipe_v_splits_only_what_fills_bubbles(size: int) -> None:
    """Phases 3 and 7 split P-1-r backwards each, phase 6 the second half of its 2 (r+1)."""
    orders = SCHEDULES["dualpipe_v"].orders(Shape(size, 2, 3 * size, size))
    assert [sum(i.op == "W" for i in order) for order in orders] == [2 * (size - 1 - r) + r + 1 for r in range(size)]


def test_dualpipe_v_reports_a_substitute_order() -> None:
    few, enough = (build_plan(PlanSpec("dualpipe_v", 4, 2, m)) for m in (7, 8))
    assert "at least 2 P = 8" in few.remark
    assert few.orders == build_plan(PlanSpec("zb_v", 4, 2, 7)).orders
    assert enough.remark == ""
    assert enough.orders != build_plan(PlanSpec("zb_v", 4, 2, 8)).orders
