"""What holds for the plan of any spec: drawn of all schedules, sizes, policies, channels, device rules and features."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from megatron_pp.plan.builder import build_plan, lowered_plan, verified_plan
from megatron_pp.plan.costs.activations import activations_timeline, host_timeline, peak_activations
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.io.serialize import format_plan, parse_plan
from megatron_pp.plan.ir.instruction import COMPUTE_OPS, each, format_program
from megatron_pp.plan.ir.instruction_text import parse_program
from megatron_pp.plan.ir.repeated import Repeated
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import Verdict, verify
from testkit.inputs.drawn_specs import DEVICES, NAMED, drawn_spec
from testkit.sweeps import EXHAUSTIVE


def verified(spec: PlanSpec) -> tuple[Plan, Verdict]:
    plan = lowered_plan(spec)
    return plan, verify(plan)


def check_orders(plan: Plan) -> None:
    """Programs compute in the plan's order: per chunk in the order of microbatches, in which gradients are added up,
    and of slices: forwards ascending, backwards descending.
    """
    for order, program in zip(plan.orders, plan.programs, strict=True):
        assert SCHEDULES[plan.spec.schedule].splits_weight or not any(at.op in "IW" for at in order)
        computed = [at for at in each(program) if at.op in COMPUTE_OPS]
        assert computed == [at for at in each(order) if at.op in "FS" or not plan.spec.forward_only]
        for chunk, ops in product(range(plan.spec.num_chunks), ("F", "BI", "BW")):
            cells = [(at.mb, max(at.part, 0)) for at in each(order) if at.op in ops and at.chunk == chunk]
            parts = range(plan.spec.num_parts)[:: 1 if ops == "F" else -1]
            assert cells == list(product(range(plan.spec.num_microbatches), parts))


def check_memory(plan: Plan, verdict: Verdict) -> None:
    """``verify``, the simulator and the timelines count alike, and nothing is left at the end."""
    ones = (1.0,) * plan.placement.num_stages
    result = simulate(plan, StageCosts.uniform(plan.placement.num_stages))
    assert verdict.activations == peak_activations(plan)
    slices = plan.spec.num_parts
    assert peak_activations(plan, 0.0) == pytest.approx([peaks.each.in_flight / slices for peaks in verdict.ranks])
    if not plan.copies_to_host:
        assert peak_activations(plan, 1.0) == pytest.approx([count / slices for count in result.peak_in_flight()])
    for rank, (program, stages) in enumerate(zip(plan.programs, plan.placement.stages, strict=True)):
        assert list(activations_timeline(plan, rank))[-1] == pytest.approx(0)
        on_host = list(host_timeline(program, stages, ones))
        assert (on_host[-1], min(on_host)) == (0, 0)


def check_forms(plan: Plan) -> None:
    """The plan is the same after a round trip through text and through JSON."""
    for rank, program in enumerate(plan.programs):
        assert plan.placement.place(rank, parse_program(format_program(program))) == tuple(program)
    assert parse_plan(format_plan(plan, "json")) == plan


@pytest.mark.parametrize("name", NAMED)
def test_any_plan_is_accepted_and_counts_and_prints_as_it_is(name: str) -> None:
    rng = random.Random(name)
    for _ in range(400 if EXHAUSTIVE else 16):
        plan, verdict = verified(drawn_spec(name, rng))
        check_orders(plan)
        check_memory(plan, verdict)
        check_forms(plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_many_plans_are_accepted(name: str) -> None:
    rng = random.Random(f"many {name}")
    for _ in range(1000 if EXHAUSTIVE else 40):
        verified(drawn_spec(name, rng))
    for size in (6, 8):
        verified(drawn_spec(name, rng, pipeline_size=size, group_size=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "auto_v"])
def test_searched_plans_are_accepted(name: str) -> None:
    for microbatches, device in product((2, 3), DEVICES[1:]):
        verified(PlanSpec(name, 2, 2, microbatches, device=device))


@pytest.mark.parametrize("name", [name for name in NAMED if SCHEDULES[name].repeats is not None])
def test_a_repeated_plan_is_the_one_that_is_made_directly(name: str) -> None:
    rng = random.Random(name)
    repeated = 0
    for _ in range(100 if EXHAUSTIVE else 5):
        spec = drawn_spec(name, rng)
        groups, more = rng.randint(5, 6), rng.choice((8, 8, 9))
        spec = replace(spec, num_microbatches=groups * (spec.group_size or spec.pipeline_size) + more)
        (direct, verdict), (plan, found) = verified(spec), verified_plan(spec)
        assert (plan.programs, plan.orders, plan.remark) == (direct.programs, direct.orders, direct.remark), spec
        assert found == verdict
        repeated += isinstance(plan.programs, Repeated)
    assert repeated >= 2


@pytest.mark.parametrize("name", NAMED)
def test_copies_to_the_host_that_take_no_time_change_no_step(name: str) -> None:
    spec = drawn_spec(name, random.Random(name), offload_chunks=1, overlap_pairs=False, device=())
    plans = [build_plan(replace(spec, offload_chunks=chunks)) for chunks in (0, 1)]
    spans = [simulate(plan, StageCosts.uniform(plan.placement.num_stages)).makespan for plan in plans]
    assert spans[0] == spans[1]
