"""Aligned queues: what is accepted by comparing positions, the queue machine accepts, faults or not."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.ir.instruction import parse_program
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.repeated import Block
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_QUEUE, Plan, PlanSpec
from megatron_pp.plan.verify import rendezvous
from megatron_pp.plan.verify.aligned import runs_aligned
from tests.harness.plan_mutants import mutants, steady_block
from tests.harness.sweeps import EXHAUSTIVE

DEVICES = [rules for count in range(3) for rules in combinations((ONE_QUEUE, DEVICE_SYNC), count)]
SPECS = [
    PlanSpec("1f1b", 3, 1, 9),
    PlanSpec("1f1b", 2, 1, 9, channels="shared"),
    PlanSpec("interleaved_1f1b", 2, 2, 8, policy="plain"),
    PlanSpec("interleaved_1f1b", 3, 2, 12),
    PlanSpec("interleaved_1f1b", 2, 2, 8, channels="shared"),
    PlanSpec("zb_h1", 3, 1, 9, device=(DEVICE_SYNC,)),
    PlanSpec("zb_v", 2, 2, 8),
    PlanSpec("dualpipe_v", 2, 2, 8, policy="plain", overlap_pairs=True),
    PlanSpec("combined_1f1b", 2, 2, 8, overlap_pairs=True),
    PlanSpec("1f1b", 3, 1, 9, policy="batched"),
    PlanSpec("interleaved_1f1b", 2, 2, 8, policy="batched", variable_shapes=True),
    PlanSpec("interleaved_1f1b", 3, 2, 12, policy="batched", channels="shared"),
    PlanSpec("interleaved_1f1b", 2, 2, 8, variable_shapes=True),
    PlanSpec("interleaved_zb", 2, 2, 8, policy="plain", channels="shared", variable_shapes=True),
]


def passes_the_machine(plan: Plan, device: tuple[str, ...], block: Block | None) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "runs_aligned", lambda *_: False)
        try:
            rendezvous.check_rendezvous(plan, device, block)
        except PlanError:
            return False
        return True


@pytest.mark.parametrize("spec", SPECS, ids=PlanSpec.describe)
def test_what_runs_aligned_passes_the_queue_machine(spec: PlanSpec) -> None:
    plan, rng, found = lowered_plan(spec), random.Random(17), Counter[tuple[bool, bool]]()
    period = _period(spec)
    faults = list(mutants(plan, rng, 2))
    for what, mutant in faults if EXHAUSTIVE else rng.sample(faults, 40):
        try:
            block = steady_block(mutant, period)
        except IndexError:  # a backward is missing
            continue
        for device in DEVICES if EXHAUSTIVE else rng.sample(DEVICES, 1):
            aligned, passes = runs_aligned(mutant, device, block), passes_the_machine(mutant, device, block)
            assert passes or not aligned, (what, device)
            found[aligned, passes] += 1
    assert found[True, True]
    assert found[False, False]


@pytest.mark.parametrize("spec", SPECS, ids=PlanSpec.describe)
def test_plans_of_every_policy_run_aligned(spec: PlanSpec) -> None:
    plan = lowered_plan(spec)
    assert runs_aligned(plan, spec.device)
    assert runs_aligned(plan, spec.device, steady_block(plan, _period(spec)))
    for device in DEVICES if not spec.overlap_pairs else [()]:
        assert runs_aligned(plan, device) == passes_the_machine(plan, device, None)


def _period(spec: PlanSpec) -> int:
    return spec.pipeline_size if spec.num_chunks > 1 and spec.schedule not in ("zb_v", "dualpipe_v") else 1


def test_collectives_are_left_to_the_queue_machine() -> None:
    plan = lowered_plan(PlanSpec("vocab_1f1b", 2, 1, 4))
    assert not runs_aligned(plan, ())
    assert passes_the_machine(plan, (), None)


def test_a_batch_is_over_when_all_its_members_are() -> None:
    exchange = hand_written("[SEND_F0.0 RECV_B0.0] FREE_F0.0 WAIT_B0.0", "[RECV_F0.0 SEND_B0.0] WAIT_F0.0 FREE_B0.0")
    assert runs_aligned(exchange, (DEVICE_SYNC,))
    waits_for_half = hand_written(
        "[SEND_F0.0 RECV_B0.0] FREE_F0.0 WAIT_B0.0", "[RECV_F0.0] WAIT_F0.0 [SEND_B0.0] FREE_B0.0"
    )
    assert runs_aligned(waits_for_half, ())
    held = hand_written(
        "[SEND_F0.0 RECV_B0.0] FREE_F0.0 WAIT_B0.0 [SEND_F0.1] FREE_F0.1",
        "[RECV_F0.0] WAIT_F0.0 [RECV_F0.1] WAIT_F0.1 [SEND_B0.0] FREE_B0.0",
    )
    assert not runs_aligned(held, ())
    assert not passes_the_machine(held, (), None)


def test_shapes_of_a_batch_go_ahead_of_all_its_tensors() -> None:
    together, apart = "[SEND_F0.0 SEND_F0.1] FREE_F0.0 FREE_F0.1", "[RECV_F0.0] WAIT_F0.0 [RECV_F0.1] WAIT_F0.1"
    plan = hand_written(together, apart)
    assert runs_aligned(plan, ())
    plan = replace(plan, spec=replace(plan.spec, variable_shapes=True))
    assert not runs_aligned(plan, ())
    assert not passes_the_machine(plan, (), None)


def test_what_waits_for_the_device_waits_for_the_sends_of_a_pair() -> None:
    plan = hand_written("SEND_F0.2 FREE_F0.2 RECV_B0.0", "(F0.1 B0.0 SEND_B0.0) RECV_F0.2")
    assert runs_aligned(plan, ())
    assert not runs_aligned(plan, (DEVICE_SYNC,))
    assert not passes_the_machine(plan, (DEVICE_SYNC,), None)


def test_batches_that_are_open_at_a_block_hold_the_same_in_one_order() -> None:
    plan = lowered_plan(PlanSpec("1f1b", 3, 1, 9, policy="batched"))
    block, first = steady_block(plan, 1), plan.programs[0]
    differ = 0
    for k, at in enumerate(first):
        swapped = at._replace(members=at.members[::-1])
        programs = ((*first[:k], swapped, *first[k + 1 :]), *plan.programs[1:])
        mutant = replace(plan, programs=programs)
        assert runs_aligned(mutant, ())
        assert runs_aligned(mutant, (), block) == passes_the_machine(mutant, (), block)
        differ += not runs_aligned(mutant, (), block)
    assert differ


@pytest.mark.parametrize("one", ["[SEND_F0.0] [SEND_F0.1] FREE_F0.0 FREE_F0.1", "[SEND_F0.0] FREE_F0.0 SEND_F0.1"])
def test_batches_that_are_not_alone_are_left_to_the_queue_machine(one: str) -> None:
    assert not runs_aligned(hand_written(one, "[RECV_F0.0] WAIT_F0.0 [RECV_F0.1] WAIT_F0.1"), ())


def hand_written(*programs: str) -> Plan:
    spec, placement = PlanSpec("1f1b", 2, 1, 1), Placement(LOOP, 2, 1)
    return Plan(spec, placement, tuple(placement.place(r, parse_program(line)) for r, line in enumerate(programs)))


def test_ranks_that_wait_in_a_circle_do_not_run() -> None:
    assert not runs_aligned(hand_written("RECV_B0.0 WAIT_B0.0 SEND_F0.0", "RECV_F0.0 WAIT_F0.0 SEND_B0.0"), ())
    assert runs_aligned(hand_written("SEND_F0.0 F0.0", "F0.0 RECV_F0.0"), (DEVICE_SYNC,))
    crossing = hand_written("SEND_F0.0 F0.0 RECV_B0.0", "SEND_B0.0 F0.0 RECV_F0.0")
    assert runs_aligned(crossing, ())
    assert not runs_aligned(crossing, (DEVICE_SYNC,))
    behind_another = hand_written("SEND_F0.0 SEND_F0.1 RECV_B0.0", "SEND_B0.0 FREE_B0.0 RECV_F0.0 RECV_F0.1")
    assert runs_aligned(behind_another, ())
    assert not runs_aligned(behind_another, (ONE_QUEUE,))
