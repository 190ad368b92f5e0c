"""Plans of a new number of microbatches: the proof that a block of the steady state may be repeated, and what is made
of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan import builder
from megatron_pp.plan.builder import build_plan, forget_plans, lowered_plan, verified_plan
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.repeated import Block, Repeated, Repeating, RepetitionError
from megatron_pp.plan.ir.spec import DEVICE_RULES, Plan, PlanSpec, Shape
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.plan.lower import lowering as lower
from megatron_pp.plan.orders import SCHEDULES, register
from megatron_pp.plan.orders.family import Order, every_microbatch
from megatron_pp.plan.orders.one_chunk import one_f_one_b
from megatron_pp.plan.verify.lifetime import check_rank
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import with_programs
from testkit.mutants.plan_mutants import mutants, steady_block
from testkit.sweeps import EXHAUSTIVE

REPEATING = [name for name, family in SCHEDULES.items() if family.repeats is not None]


@pytest.fixture(autouse=True)
def _no_plans_are_known() -> Iterator[None]:
    forget_plans()
    yield
    forget_plans()


def test_tasks_are_those_of_the_program_and_shared_between_numbers_of_microbatches() -> None:
    plans = [build_plan(PlanSpec("interleaved_1f1b", 2, 2, count, policy="batched")) for count in (30, 40)]
    for plan in plans:
        for rank in range(2):
            tasks = plan.tasks(rank)
            assert [at.instruction for at in tasks] == list(plan.programs[rank])
            for task, other in zip(tasks, map(Task, plan.programs[rank]), strict=True):
                assert (task.key, task.message, task.peer) == (other.key, other.message, other.peer)
                assert [one.message for one in task.members] == [one.message for one in other.members]
    shared = set(map(id, plans[0].tasks(0))) & set(map(id, plans[1].tasks(0)))
    assert len(shared) > len(plans[0].tasks(0)) / 2


def test_repeated_programs_equal_the_same_lines_and_no_others() -> None:
    some, more = (build_plan(PlanSpec("1f1b", 2, 1, count)).programs for count in (30, 31))
    assert isinstance(some, Repeated)
    assert some == tuple(some)
    for other in (more, tuple(more), some[:1], (), None):
        assert some != other


def test_a_new_number_of_microbatches_lowers_and_verifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    verified_plan(PlanSpec("1f1b", 4, 1, 40))

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("a plan was made")

    for name in ("lowered_plan", "verify"):
        monkeypatch.setattr(builder, name, refuse)
    plan, _ = verified_plan(PlanSpec("1f1b", 4, 1, 57))
    assert plan.spec.num_microbatches == 57
    assert sum(at.op == "F" for at in plan.programs[3]) == 57
    with pytest.raises(AssertionError, match="a plan was made"):
        verified_plan(PlanSpec("1f1b", 4, 1, 5))  # too few for a steady state


def is_refused(plan: Plan, block: Block | None = None) -> bool:
    try:
        verify(plan, block=block)
    except PlanError:
        return True
    return False


MUTATED = [
    PlanSpec("1f1b", 2, 1, 14),
    PlanSpec("interleaved_1f1b", 2, 2, 10, policy="plain"),
    PlanSpec("interleaved_1f1b", 2, 2, 10, policy="batched"),
    PlanSpec("zb_h1", 2, 1, 14, device=DEVICE_RULES[1:]),
    PlanSpec("1f1b", 2, 1, 14, variable_shapes=True, channels="shared"),
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", MUTATED, ids=PlanSpec.describe)
def test_no_fault_passes_that_the_whole_plan_is_refused_for(spec: PlanSpec) -> None:
    """Faults in front of the block, in it, at its ends and behind it."""
    plan = lowered_plan(spec)
    period = 1 if spec.num_chunks == 1 else 2
    assert not is_refused(plan, steady_block(plan, period))
    more = replace(spec, num_microbatches=spec.num_microbatches + 2 * period)
    orders = lowered_plan(more).orders
    rng = random.Random(17)
    refused = 0
    faults = list(mutants(plan, rng, 2))
    for what, mutant in faults if EXHAUSTIVE else rng.sample(faults, 120):
        try:
            block = steady_block(mutant, period)
        except IndexError:  # a backward is missing
            continue
        programs = tuple(Repeated(Repeating(mutant.programs, block, {}), 2))
        if is_refused(replace(plan, spec=more, programs=programs, orders=orders)):
            refused += 1
            assert is_refused(mutant, block), what
    assert refused > 50


@pytest.mark.parametrize(
    ("schedule", "ends", "words"),
    [
        ("gpipe", (2, 3), "tensors or microbatches differ"),  # forwards alone: tensors become more
        ("1f1b", (9, 10), "tensors or microbatches differ"),
    ],
)
def test_a_block_that_changes_the_pipeline_is_refused(schedule: str, ends: tuple[int, int], words: str) -> None:
    plan = lowered_plan(PlanSpec(schedule, 2, 1, 12))
    forwards = [[k for k, at in enumerate(program, 1) if at.op == "F"] for program in plan.programs]
    starts, stops = (tuple(of_rank[end] for of_rank in forwards) for end in ends)
    with pytest.raises(RepetitionError, match=words):
        verify(plan, block=Block(starts, stops, 1 if schedule == "gpipe" else 2))


def test_a_block_whose_ranks_stand_still_elsewhere_at_its_ends_is_refused() -> None:
    """By itself, each rank is in the same state at both ends. But at the starts rank 1 waits for F0.1 before B0.0, and
    at the ends for F0.2 behind B0.1: only the run of all ranks shows it."""
    plan = with_programs(
        lowered_plan(PlanSpec("1f1b", 2, 1, 3)),
        "F0.0 SEND_F0.0 FREE_F0.0 F0.1 RECV_B0.0 SEND_F0.1 WAIT_B0.0 FREE_F0.1 B0.0 F0.2 RECV_B0.1 SEND_F0.2 WAIT_B0.1 "
        "FREE_F0.2 B0.1 RECV_B0.2 WAIT_B0.2 ENABLE_GRAD_SYNC0 B0.2",
        "RECV_F0.0 WAIT_F0.0 F0.0 RECV_F0.1 WAIT_F0.1 B0.0 SEND_B0.0 FREE_B0.0 F0.1 B0.1 RECV_F0.2 SEND_B0.1 WAIT_F0.2 "
        "FREE_B0.1 F0.2 ENABLE_GRAD_SYNC0 B0.2 SEND_B0.2 FREE_B0.2",
    )
    block = Block((3, 7), (9, 13), 1)
    for rank in range(2):
        check_rank(plan, rank, block=block)
    with pytest.raises(RepetitionError, match="sends and receives differ between both ends of the block"):
        verify(plan, block=block)


def test_the_shapes_of_messages_that_are_over_are_no_part_of_the_state() -> None:
    plan = lowered_plan(PlanSpec("1f1b", 2, 1, 14, variable_shapes=True, policy="plain"))
    verify(plan, block=steady_block(plan, 1))


def test_a_sync_in_the_block_is_refused() -> None:
    plan = lowered_plan(PlanSpec("1f1b", 1, 1, 4))
    length = len(plan.programs[0])
    with pytest.raises(RepetitionError, match="the block has a sync"):
        verify(plan, block=Block((0,), (length,), 4))


def test_a_family_whose_order_does_not_repeat_as_it_says_is_made_directly() -> None:
    def orders(shape: Shape) -> list[Order]:
        found = one_f_one_b(shape)
        return [sorted(order, key=lambda at: at.op != "F") for order in found] if shape.num_microbatches % 2 else found

    family = replace(SCHEDULES["1f1b"], name="odd_ones", orders=orders, repeats=every_microbatch)
    register(family)
    try:
        for count in (20, 21):
            spec = PlanSpec("odd_ones", 2, 1, count)
            assert build_plan(spec).programs == lowered_plan(spec).programs
    finally:
        del SCHEDULES["odd_ones"]


def test_the_schedules_without_a_steady_state_are_those_of_the_page() -> None:
    assert set(SCHEDULES) - set(REPEATING) == {"gpipe", "breadth_first", "v_half", "auto", "auto_v"}


def test_a_rank_lays_out_no_other_program_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_plan(PlanSpec("interleaved_1f1b", 4, 2, 40))
    laid_out = []
    program = lower.RankLowering.program

    def recorded(ranked: lower.RankLowering) -> list[Instruction]:
        laid_out.append(ranked.rank)
        return program(ranked)

    monkeypatch.setattr(lower.RankLowering, "program", recorded)
    plan.tasks(2)
    build_plan(PlanSpec("interleaved_1f1b", 4, 2, 60)).tasks(2)
    assert laid_out == [2]


def test_the_collector_is_paused_for_a_plan_alone() -> None:
    assert gc.isenabled()
    build_plan(PlanSpec("1f1b", 2, 1, 30)).tasks(0)
    assert gc.isenabled()
    gc.disable()
    try:
        build_plan(PlanSpec("1f1b", 2, 1, 31)).tasks(0)
        assert not gc.isenabled()
    finally:
        gc.enable()
