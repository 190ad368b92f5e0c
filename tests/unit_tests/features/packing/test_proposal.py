"""What is proposed for a step: faster, verified, in no more memory, and with every sum in its order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.features.packing.proposal import Proposal, _sums, proposed, why_not
from megatron_pp.features.packing.step_ahead import _relisted
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.instruction import format_program
from megatron_pp.plan.ir.instruction_text import parse_program
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders.list_scheduler import Problem, Rules, schedule
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner.improve import improved
from megatron_pp.planner.plan_search import peak_memory, slots_of

NARROW = Network(activation_bytes=1.0, link=Link(bandwidth=10.0), links={(0, 1): Link(bandwidth=0.5)}, gloo=True)


def slowed(stages: int, slow: int = 0) -> StageCosts:
    times = [1.5 if stage == slow else 1.0 for stage in range(stages)]
    return StageCosts.per_stage(times, times, times)


def another(
    plan: Plan, splits: bool, draws: bool, costs: StageCosts, network: Network, shares: tuple[float, ...] = ()
) -> Proposal | str:
    """By default for microbatches that cost the same."""
    return proposed(plan, splits, draws, costs, network, shares, _relisted)


def sums(plan: Plan, draws: bool = False) -> list[object]:
    return [_sums(order, draws) for order in plan.orders]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks", "splits"), [("1f1b", 1, True), ("gpipe", 1, False), ("gis", 2, True)])
def test_a_proposal_is_faster_in_the_same_memory_and_adds_up_in_the_same_order(
    name: str, chunks: int, splits: bool
) -> None:
    running = build_plan(PlanSpec(name, 3, chunks, 5))
    costs = slowed(3 * chunks)
    found = another(running, splits, False, costs, NARROW)
    assert isinstance(found, Proposal), found
    again = Proposal.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    plan = again.plan()
    verify(plan)
    assert plan.certificate is not None
    assert plan.certificate.digest == found.digest
    old, new = (simulate(one, costs, NARROW).makespan for one in (running, plan))
    assert new < 0.99 * old
    assert f"{old:.4g} ms, to auto, {new:.4g} ms" in found.sentence
    assert sums(plan) == sums(running)
    assert any(at.op == "W" for at in plan.orders[0]) == splits
    free = Measured(activation=1.0, weight_activation=1.0).memory(plan.placement)
    for rank, stages in enumerate(plan.placement.stages):
        peaks = [peak_memory(one.orders[rank], stages, free) for one in (plan, running)]
        assert peaks[0] <= peaks[1]
    # What was proposed stays, as long as nothing changes.
    assert isinstance(another(plan, splits, False, costs, NARROW), str)


def test_less_than_one_percent_changes_nothing() -> None:
    running = build_plan(PlanSpec("zb_h2", 2, 1, 6))
    assert another(running, True, False, StageCosts.uniform(2), Network()) == (
        "auto finds none that is shorter by 1% (the best one: 0.0%)"
    )


def test_memory_that_was_measured_stays_the_limit() -> None:
    measured = Measured(memory_limit=(5.0, 4.0), activation=(2.0, 1.0), weight_activation=0.5)
    running = build_plan(PlanSpec("auto", 2, 1, 4, measured=measured))
    found = another(running, True, False, slowed(2, 1), NARROW)
    spec = found.spec if isinstance(found, Proposal) else running.spec
    assert spec.measured is not None
    assert (spec.measured.memory_limit, spec.measured.activation) == ((5.0, 4.0), (2.0, 1.0))


def test_forwards_that_draw_random_numbers_stay_in_their_order() -> None:
    running = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 4))
    other = build_plan(PlanSpec("breadth_first", 2, 2, 4))
    assert sums(other, draws=True) != sums(running, draws=True)

    def finder(plan: Plan, spec: PlanSpec, measured: Measured, allowed: Callable[[Plan], bool]) -> list[Plan]:
        return [replace(other, spec=spec)] if allowed(other) else []

    found = [proposed(running, True, draws, slowed(4, 3), Network(), (1.0,) * 4, finder) for draws in (False, True)]
    assert found[0] != found[1] == "no other order is found"


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", "F0.0 F0.1 I0.0 I0.1 W0.1 W0.0"),
        ("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", "F0.0 F0.1 I0.1 I0.0 W0.0 W0.1"),
        ("F0.0 F0.1 B0.0 B0.1", "F0.1 F0.0 B0.0 B0.1"),
        ("F0.0 F0.1 B0.0 B0.1", "F0.0 F0.1 I0.0 B0.1 W0.0"),
    ],
)
def test_orders_in_which_a_sum_would_change(line: str, other: str) -> None:
    assert _sums(parse_program(line), False) != _sums(parse_program(other), False)


def test_a_split_backward_adds_up_as_a_whole_one_does() -> None:
    whole, split = parse_program("F0.0 F0.1 B0.0 B0.1"), parse_program("F0.0 F0.1 I0.0 W0.0 I0.1 W0.1")
    assert _sums(whole, True) == _sums(split, True)


def test_programs_that_are_not_the_verified_ones_are_refused() -> None:
    plan = build_plan(PlanSpec("1f1b", 2, 1, 2))
    assert plan.certificate is not None
    proof = plan.certificate.rules, plan.certificate.device, plan.certificate.digest
    found = Proposal(plan.spec, "loop", tuple(map(format_program, plan.programs)), *proof, "")
    assert found.plan() == plan
    with pytest.raises(PlanError, match="which were verified"):
        replace(found, programs=found.programs[::-1]).plan()


@pytest.mark.slow
def test_unequal_microbatches_are_planned_for_what_each_costs() -> None:
    running = build_plan(PlanSpec("1f1b", 3, 1, 6))
    shares, costs = (1.0, 4.0, 1.0, 1.0, 4.0, 1.0), StageCosts.uniform(3)
    found = another(running, True, False, costs, NARROW, shares)
    assert isinstance(found, Proposal)
    assert found.shares == shares
    unequal = replace(costs, microbatches=shares)
    old, new = (simulate(one, unequal, NARROW).makespan for one in (running, found.plan()))
    assert new < 0.99 * old
    assert sums(found.plan()) == sums(running)


def test_the_searchers_clock_knows_links_and_microbatches() -> None:
    """The greedy scheduler, local search and the simulator agree on the time of an order."""
    plan = build_plan(PlanSpec("gpipe", 2, 1, 3))
    costs = replace(StageCosts.uniform(2), microbatches=(1.0, 3.0, 2.0))
    memory = Measured(activation=1.0).memory(plan.placement)
    problem = Problem(plan.placement, 3, memory, costs, 0.25, {(0, 1): 0.75})
    made = schedule(problem, slots_of(plan.orders), Rules(split=False))
    assert made is not None
    assert made.makespan > schedule(replace(problem, links={}), slots_of(plan.orders), Rules(split=False)).makespan  # type: ignore[union-attr]
    network = Network(link=Link(latency=0.25), links={(0, 1): Link(latency=0.75)})
    moved = lowered(plan.spec, plan.placement, made.orders)
    assert simulate(moved, costs, network).makespan == pytest.approx(made.makespan)
    assert improved(problem, made, made.makespan, 1000)[0].makespan == pytest.approx(made.makespan)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (PlanSpec("seq_1f1b", 2, 1, 2, slices=2), "slices"),
        (PlanSpec("vocab_1f1b", 2, 1, 2), "splits the output layer"),
        (PlanSpec("pipe_offload", 2, 2, 4), "offloaded"),
        (PlanSpec("1f1b", 2, 1, 2, offload_chunks=1), "offloaded"),
        (PlanSpec("1f1b", 2, 1, 2, skip_tensors="a=0>1"), "tensors skip stages"),  # type: ignore[arg-type]
        (PlanSpec("combined_1f1b", 2, 2, 2, overlap_pairs=True), "pairs"),
        (PlanSpec("pipe_offload", 2, 2, 4, offload_chunks=0), ""),
        (PlanSpec("dualpipe_v", 2, 2, 4), ""),
        (PlanSpec("auto", 2, 1, 2), ""),
    ],
)
def test_which_steps_can_have_other_plans(spec: PlanSpec, why: str) -> None:
    assert why in why_not(spec)
    assert bool(why) == bool(why_not(spec))
