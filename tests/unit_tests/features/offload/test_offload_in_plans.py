"""Offloading in plans: PipeOffload's numbers, rules that hold copies together, and their time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.features.offload.offload_instructions import FREE_OFFLOAD, LOAD, OFFLOAD, WAIT_LOAD
from megatron_pp.plan.builder import build_plan, verified_plan
from megatron_pp.plan.costs.activations import activations_timeline, host_timeline
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, Instruction, format_program
from megatron_pp.plan.ir.instruction_text import parse_program
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_QUEUE, Plan, PlanSpec
from megatron_pp.plan.simulate.memory import ModelShape, peak_bytes, rank_memory
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner import auto
from testkit.inputs import plan_text
from testkit.inputs.plan_text import rows

COPIES = (OFFLOAD, FREE_OFFLOAD, LOAD, WAIT_LOAD)


def simulated(spec: PlanSpec, copy: float = 0.0, device: Sequence[str] = (), half: float = 0.5) -> Simulation:
    """With F = 1 and B = 2 ``half``, and copies of that length."""
    plan = build_plan(spec)
    costs = StageCosts.uniform(plan.placement.num_stages, 1.0, half, half)
    return simulate(plan, replace(costs, offload=(copy,) * plan.placement.num_stages), device=device)


# -- PipeOffload ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "chunks", "offloaded", "peak"),
    [(8, 4, None, 8), (8, 4, 0, 23), (8, 4, 4, 3), (16, 4, None, 14), (8, 6, None, 9), (4, 2, None, 3)],
)
def test_peaks_of_pipe_offload(size: int, chunks: int, offloaded: int | None, peak: float) -> None:
    """With half of the chunks offloaded (V+2)/(8V) of the P V that GIS keeps, but for the forward that runs, one that
    is being copied, and what turns are rounded up by; with all of them, those two alone.
    """
    plan, verdict = verified_plan(PlanSpec("pipe_offload", size, chunks, 32, offload_chunks=offloaded))
    assert max(verdict.activations) == peak
    assert max(verdict.on_host) == max(simulated(plan.spec).peak_on_host())
    if offloaded is None:
        kept = (chunks + 2) / (8 * chunks) * size * chunks
        assert kept < peak <= kept + 2
    if offloaded == 0:
        assert not any(verdict.on_host)


@pytest.mark.slow
def test_table_1_of_pipe_offload() -> None:
    """At P=8, V=4, M=32, F = B: the bubble, which offloading does not change."""
    for chunks in (None, 0):
        assert simulated(PlanSpec("pipe_offload", 8, 4, 32, offload_chunks=chunks)).makespan == 56 + 32 * 4 * 2


def test_copies_to_and_from_host_are_placed_as_described() -> None:
    plan = build_plan(PlanSpec("1f1b", 2, 1, 3, offload_chunks=1))
    assert format_program(plan.programs[0]) == (
        "F0.0 SEND_F0.0 F0.1 RECV_B0.0 SEND_F0.1 FREE_F0.0 OFFLOAD0.1 FREE_OFFLOAD0.1 WAIT_B0.0 B0.0 RECV_B0.1 "
        "FREE_F0.1 LOAD0.1 F0.2 SEND_F0.2 WAIT_B0.1 WAIT_LOAD0.1 B0.1 RECV_B0.2 FREE_F0.2 WAIT_B0.2 ENABLE_GRAD_SYNC0 "
        "B0.2"
    ), "those of microbatches 0 and 2 would be back before they are gone"
    assert not any(at.op in COPIES for at in plan.programs[1]), "the last rank runs each backward at once"


# -- rules ------------------------------------------------------------------------------------------------------------

PLAN = build_plan(PlanSpec("pipe_offload", 2, 2, 6))


def place_of(op: str, mb: int = 3) -> int:
    return next(i for i, at in enumerate(PLAN.programs[0]) if at.op == op and at.mb == mb)


def refusal(program: Sequence[Instruction]) -> str:
    return plan_text.refusal(replace(PLAN, programs=(tuple(program), *PLAN.programs[1:])))


REFUSED = """
move B0.3 before WAIT_LOAD0.3 | B0.3 (backward of chunk 0, microbatch 3): it comes before what was offloaded is back
move LOAD0.3 before FREE_OFFLOAD0.3 | it comes before its offload was waited for
move OFFLOAD0.3 before F0.3 | it comes before its forward ran
move FREE_OFFLOAD0.3 before OFFLOAD0.3 | it comes before its offload was posted
move FREE_OFFLOAD0.3 behind LOAD0.3 | LOAD0.3
move LOAD0.3 behind WAIT_LOAD0.3 | WAIT_LOAD0.3
move WAIT_LOAD0.3 behind B0.3 | B0.3
OFFLOAD0.3 with mb=2 | OFFLOAD0.2
FREE_OFFLOAD0.3 with mb=2 | FREE_OFFLOAD0.2
LOAD0.3 with mb=2 | LOAD0.2
WAIT_LOAD0.3 with mb=2 | WAIT_LOAD0.2
"""


@pytest.mark.parametrize(("edit", "words"), rows(REFUSED))
def test_copies_out_of_place_are_refused(edit: str, words: str) -> None:
    found = plan_text.refusal(plan_text.edited(PLAN, 0, edit))
    assert found.startswith("rank 0: ")
    assert words in found


def test_an_offload_after_the_backward_is_refused() -> None:
    program = [at for at in PLAN.programs[0] if at.op not in COPIES or at.mb != 3]
    backward = next(i for i, at in enumerate(program) if (at.op, at.chunk, at.mb) == (BACKWARD, 0, 3))
    offload = PLAN.programs[0][place_of(OFFLOAD)]
    assert "it comes after its backward ran" in refusal([*program[: backward + 1], offload, *program[backward + 1 :]])
    verify(replace(PLAN, programs=(tuple(program), *PLAN.programs[1:])))  # without any it stands


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"offload_chunks": 3}, "3 chunks of every rank are to be offloaded; it has 2"),
        ({"offload_chunks": -1}, "number of offloaded chunks is -1"),
        ({"offload_slots": 0}, "offload_slots is 0"),
        ({"overlap_pairs": True}, "pairs .* cannot be offloaded"),
    ],
)
def test_impossible_offload_settings_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        build_plan(PlanSpec("pipe_offload", 2, 2, 4, **fields))


# -- any schedule, any sizes ------------------------------------------------------------------------------------------


def test_host_and_device_memory_add_up_to_the_memory_without_offloading() -> None:
    """At every instruction the two together are the forwards before their backward, but for what is copied."""
    placement, program = PLAN.placement, PLAN.programs[0]
    ones = (1.0,) * placement.num_stages
    kept, on_host = activations_timeline(PLAN, 0), host_timeline(program, placement.stages[0], ones)
    open_, copied = set(), set()
    for at, device, host in zip(program, kept, on_host, strict=True):
        cell = at.chunk, at.mb
        if at.op == FORWARD:
            open_.add(cell)
        elif at.op == BACKWARD:
            open_.discard(cell)
        elif at.op in (OFFLOAD, LOAD):
            copied.add(cell)
        elif at.op in (FREE_OFFLOAD, WAIT_LOAD):
            copied.discard(cell)
        assert device + host == len(open_) + len(copied)


def test_bytes_on_device_and_host() -> None:
    shape = ModelShape(num_layers=8, hidden_size=64, seq_length=32, num_attention_heads=4)
    spec = PlanSpec("pipe_offload", 2, 2, 8)
    plan, whole = build_plan(spec), build_plan(replace(spec, offload_chunks=0))
    assert max(peak_bytes(plan, shape)) < max(peak_bytes(whole, shape))
    each = 2 * shape.layer_bytes  # what a chunk keeps, its input included
    peaks = simulated(spec).peak_on_host()
    assert rank_memory(plan, 1, shape).host_peak == pytest.approx(peaks[1] * each)
    assert [rank_memory(whole, rank, shape).host_peak for rank in range(2)] == [0, 0]


# -- time -------------------------------------------------------------------------------------------------------------


def test_copies_take_turns_on_an_engine_for_each_direction() -> None:
    step = simulated(PlanSpec("gis", 4, 2, 8, offload_chunks=2), copy=0.7)
    for made in step.copies:
        for op in (OFFLOAD, LOAD):
            spans = [(copy.start, copy.end) for copy in made if copy.instruction.op == op]
            assert all(end - start == pytest.approx(0.7) for start, end in spans)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize(("copy", "slots", "exposed"), [(1.0, 1, False), (2.0, 2, False), (3.0, 1, True)])
def test_copies_that_fit_their_slots_are_hidden(copy: float, slots: int, exposed: bool) -> None:
    spec = PlanSpec("pipe_offload", 4, 4, 16, offload_slots=slots)
    step = simulated(spec, copy)
    assert (step.makespan > simulated(spec).makespan) == exposed


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_copies_back_begin_early_enough_for_their_turns(schedule: str, chunks: int, slots: int) -> None:
    """The engine makes one copy at a time. If backwards follow each other faster, copies back have to begin earlier."""
    spec = PlanSpec(schedule, 4, chunks, 8, offload_chunks=chunks, offload_slots=slots)
    assert build_plan(spec).copies_to_host
    assert simulated(spec, copy=slots).makespan == simulated(spec).makespan


def test_a_forward_that_stays_on_the_device_makes_no_copy_begin_earlier() -> None:
    """It takes no turn of the engine. If it did, copies back would begin earlier, and memory would hold 7 chunks."""
    _, verdict = verified_plan(PlanSpec("gis", 4, 2, 8, offload_chunks=2, offload_slots=2))
    assert max(verdict.activations) == 5


def test_a_wait_for_a_copy_is_exposed_time() -> None:
    """F0 F1 B0 B1: the first backward waits for what was copied away and back."""
    plan = Plan(PlanSpec("1f1b", 1, 1, 2), Placement(LOOP, 1, 1), ())
    order = "F0.0 OFFLOAD0.0 F0.1 FREE_OFFLOAD0.0 LOAD0.0 WAIT_LOAD0.0 B0.0 ENABLE_GRAD_SYNC0 B0.1"
    plan = replace(plan, programs=(plan.placement.place(0, parse_program(order)),))
    verify(plan)
    costs = replace(StageCosts.uniform(1, 1.0, 0.5, 0.5), offload=(3.0,))
    step = simulate(plan, costs)
    # The copy runs from 1 to 4, beside F0.1; back from 4 to 7; then two backwards.
    assert [(copy.start, copy.end) for copy in step.copies[0]] == [(1, 4), (4, 7)]
    assert (step.makespan, step.waits[0].copy, step.busy[0]) == (9, 5, 4)


def test_rules_of_the_device() -> None:
    """Behind an unfinished copy of its engine a copy holds one hardware queue; a synchronisation waits for all."""
    spec = PlanSpec("gis", 2, 2, 8, offload_chunks=2)
    free, queued = (simulated(spec, 2.5, device) for device in ((), (ONE_QUEUE,)))
    assert sum(w.queued for w in free.waits) == 0
    assert sum(w.queued for w in queued.waits) > 0
    synced = simulated(replace(spec, device=(DEVICE_SYNC,)), 2.5, (DEVICE_SYNC,))
    for rank, made in enumerate(synced.copies):
        ends = [event.end for event in synced.events(rank) if event.instruction.op in (FORWARD, BACKWARD)]
        for copy in made:  # the first operation that ends behind its start does not end before it
            assert min((end for end in ends if end > copy.start + 1e-9), default=copy.end) >= copy.end


def test_copies_are_local() -> None:
    """Whatever their place, they hang nothing: with all copies dropped the rest is the plan without offloading."""
    spec = PlanSpec("pipe_offload", 4, 2, 8)
    without = [tuple(at for at in program if at.op not in COPIES) for program in build_plan(spec).programs]
    assert without == list(build_plan(replace(spec, offload_chunks=0)).programs)


# -- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("copy", "offloads"), [(None, False), (0.5, True), (20.0, False)])
def test_auto_offloads_where_copies_are_measured_and_hidden(copy: float | None, offloads: bool) -> None:
    """Under a limit in which a faster order fits when it offloads; the plan that runs is the one that was chosen."""
    measured = Measured(memory_limit=3.0, offload=copy)
    spec = PlanSpec("auto", 2, 2, 4, measured=measured)
    best = auto.found(spec).best
    plan, verdict = verified_plan(spec)
    assert plan.copies_to_host == offloads
    assert max(verdict.activations) <= 3.0
    assert plan.programs == best.plan.programs
    costs, network = measured.costs(4), measured.network()
    assert simulate(plan, costs, network).makespan == best.makespan
    whole = build_plan(replace(spec, measured=replace(measured, offload=None)))
    assert (best.makespan < simulate(whole, costs, network).makespan) == offloads


def test_without_a_limit_auto_offloads_nothing() -> None:
    assert not build_plan(PlanSpec("auto", 2, 2, 4, measured=Measured(offload=0.0))).copies_to_host
