"""``verify`` accepts every plan that the package makes, and refuses broken ones with the rank, the instruction and the
reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.ir.ledger import Memory
from megatron_pp.plan.ir.spec import EXPLICIT, Plan, PlanSpec
from megatron_pp.plan.verify.lifetime import LifetimeWalk
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import edited, refusal, rows, with_programs

# -- accepts ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_accepts_a_large_plan() -> None:
    verdict = verify(lowered_plan(PlanSpec("interleaved_1f1b", 16, 8, 128)))
    in_flight = [peaks.each.in_flight for peaks in verdict.ranks]
    assert in_flight == [2 * (15 - rank) + 7 * 16 + 1 for rank in range(16)]  # the warm-up, and one more


def test_the_verdict_says_what_the_plan_needs() -> None:
    verdict = verify(lowered_plan(PlanSpec("1f1b", 4, 1, 8, policy="plain")))
    assert [peaks.each.in_flight for peaks in verdict.ranks] == [4, 3, 2, 1]
    # Those in flight, and the next one, received at the boundary before.
    assert [peaks.each.inputs for peaks in verdict.ranks] == [0, 4, 3, 2]
    assert [peaks.each.pending_sends for peaks in verdict.ranks] == [1, 1, 1, 1]  # waited at once
    text = str(verdict)
    assert text.startswith("deadlock-free, every send waited before its buffer is released; peak on rank 1: ")


@pytest.mark.parametrize(
    "spec",
    [
        PlanSpec("1f1b", 2, 1, 2, param_sync=True),  # one chunk has no parameter sync
        # A parameter sync stands directly before the last backward of its chunk, and is no gradient sync for it.
        PlanSpec("zb_v", 1, 2, 1, param_sync=True, grad_sync=EXPLICIT),
    ],
)
def test_verify_accepts_the_shortest_plans_with_syncs(spec: PlanSpec) -> None:
    verify(lowered_plan(spec))


# -- refuses ----------------------------------------------------------------------------------------------------------


def plan_1f1b(**fields: object) -> Plan:
    """P=2, V=1, M=2, plain:

    rank 0: F0.0 SEND_F0.0 FREE_F0.0 F0.1 SEND_F0.1 RECV_B0.0 WAIT_B0.0 FREE_F0.1 B0.0 RECV_B0.1 WAIT_B0.1
            ENABLE_GRAD_SYNC0 B0.1
    rank 1: RECV_F0.0 WAIT_F0.0 F0.0 RECV_F0.1 WAIT_F0.1 B0.0 SEND_B0.0 FREE_B0.0 F0.1 ENABLE_GRAD_SYNC0 B0.1 SEND_B0.1
            FREE_B0.1
    """
    return lowered_plan(PlanSpec("1f1b", 2, 1, 2, policy="plain", **fields))  # type: ignore[arg-type]


BROKEN = """
# Missing; that each operation may neither be missing nor stand twice is in ir/test_rules.py.
0 | drop B0.1 | rank 0: at the end of the plan, of chunk 0, microbatch 1 it is not true that its backward ran
0 | drop FREE_F0.1 | of chunk 0, microbatch 1 it is not true that its output was released
1 | drop FREE_B0.1 | of chunk 0, microbatch 1 it is not true that its input gradient was released
# In the wrong place.
0 | move SEND_F0.0 before F0.0 | (send of the activation of chunk 0, microbatch 0): it comes before its forward
0 | move FREE_F0.1 before SEND_F0.1 | (release of the activation of chunk 0, microbatch 1): it comes before its
# What this stage does not have.
0 | add RECV_F0.0 before F0.0 | RECV_F0.0 (receive of the activation of chunk 0, microbatch 0): stage 0 has no such step
1 | add SEND_F0.0 before B0.0 | SEND_F0.0 (send of the activation of chunk 0, microbatch 0): stage 1 has no such step
1 | add HAND_F0.1 before F0.1 | rank 1: HAND_F0.1 (hand-off of the activation of chunk 0, microbatch 1):
0 | add F1.0 before F0.0 | rank 0: F1.0 (forward of chunk 1, microbatch 0): there is no such stage and mic
0 | add F0.2 before B0.0 | stages are 0, microbatches 0..1
# Marks.
0 | drop ENABLE_GRAD_SYNC0 | rank 0: the gradients of chunk(s) [0] are never synchronised
0 | twice ENABLE_GRAD_SYNC0 | (start of gradient sync in the backward of chunk 0): it occurs twice, or names no chunk of
0 | add ENABLE_GRAD_SYNC1 before B0.1 | ENABLE_GRAD_SYNC1 (start of gradient sync in the backward of chunk 1): it occurs
1 | move ENABLE_GRAD_SYNC0 before B0.0 | in the backward of chunk 0): the backward that follows is not the one
1 | add GRAD_SYNC0 before SEND_B0.1 | rank 1: GRAD_SYNC0 (gradient sync of chunk 0):
0 | add PARAM_SYNC0 before B0.0 | PARAM_SYNC0 (parameter sync of chunk 0): it comes after the chunk's first forward
"""
EXPLICIT_SYNCS = """
0 | drop GRAD_SYNC1 | rank 0: the gradients of chunk(s) [1] are never synchronised
0 | move GRAD_SYNC1 before B1.1 | GRAD_SYNC1 (gradient sync of chunk 1): it comes before the chunk's last gradient
0 | drop PARAM_SYNC1 | rank 0: the parameters of chunk(s) [1] are never synchronised
1 | twice PARAM_SYNC0 | rank 1: PARAM_SYNC0 (parameter sync of chunk 0): it occurs twice
1 | move PARAM_SYNC1 before F1.1 | PARAM_SYNC1 (parameter sync of chunk 1): it comes after the chunk's first forward
"""
HAND_OVERS = """
0 | move HAND_F1.0 before F0.0 | (hand-off of the activation of chunk 1, microbatch 0): stage 0 has not produced
0 | move HAND_B0.0 before B1.0 | (hand-off of the gradient of chunk 0, microbatch 0): stage 1 has not produced
0 | drop HAND_F1.1 | rank 0: F1.1 (forward of chunk 1, microbatch 1): it comes before its input is there
0 | twice HAND_B0.1 | its output gradient is there already: it occurs twice
"""
EVALUATION = """
0 | add ENABLE_GRAD_SYNC0 before F0.1 | gradient sync in the backward of chunk 0): a forward-only plan has no
0 | add B0.0 before F0.1 | stage 0 has no such step
"""
SYNCS = {"grad_sync": EXPLICIT, "param_sync": True}
REFUSED = [
    (plan_1f1b, BROKEN),
    (lambda: lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 2, **SYNCS)), EXPLICIT_SYNCS),
    (lambda: lowered_plan(PlanSpec("breadth_first", 1, 2, 2)), HAND_OVERS),
    (lambda: plan_1f1b(forward_only=True), EVALUATION),
]


@pytest.mark.parametrize(
    ("make", "rank", "edit", "words"), [(make, *row) for make, table in REFUSED for row in rows(table)]
)
def test_verify_refuses_one_broken_instruction(make: Callable[[], Plan], rank: str, edit: str, words: str) -> None:
    plan = make()
    verify(plan)
    assert words in refusal(edited(plan, int(rank), edit))


def test_verify_refuses_a_wrong_batch_and_a_missing_program() -> None:
    plan = lowered_plan(PlanSpec("1f1b", 2, 1, 2, policy="batched"))
    programs = [tuple(at._replace(op="W") if at.members else at for at in program) for program in plan.programs]
    assert refusal(replace(plan, programs=tuple(programs))).startswith("rank 0: W has members, [SEND_F0.0]: only")
    assert refusal(replace(plan, programs=plan.programs[:1])) == "the plan has 1 rank programs for a pipeline of 2"


def test_verify_refuses_1f1b_whose_sends_are_waited_for_alone() -> None:
    """Each rank waits on its send before it posts the receive that the other one needs: the classic hang."""
    plan = with_programs(
        lowered_plan(PlanSpec("1f1b", 2, 1, 3)),
        "F0.0 SEND_F0.0 FREE_F0.0 F0.1 SEND_F0.1 FREE_F0.1 RECV_B0.0 WAIT_B0.0 B0.0 F0.2 SEND_F0.2 FREE_F0.2 "
        "RECV_B0.1 WAIT_B0.1 B0.1 RECV_B0.2 WAIT_B0.2 ENABLE_GRAD_SYNC0 B0.2",
        "RECV_F0.0 WAIT_F0.0 F0.0 B0.0 SEND_B0.0 FREE_B0.0 RECV_F0.1 WAIT_F0.1 F0.1 B0.1 SEND_B0.1 FREE_B0.1 "
        "RECV_F0.2 WAIT_F0.2 F0.2 ENABLE_GRAD_SYNC0 B0.2 SEND_B0.2 FREE_B0.2",
    )
    assert refusal(plan) == (
        "deadlock under rendezvous: rank 0 waits at FREE_F0.1 for rank 1 to post the receive that matches SEND_F0.1; "
        "rank 1 waits at FREE_B0.0 for rank 0 to post the receive that matches SEND_B0.0"
    )


def test_verify_names_a_cycle_of_three_ranks() -> None:
    """Ranks 0, 1, 2 each wait for a message that the next one in the circle posts only after its own wait."""
    plan = lowered_plan(PlanSpec("interleaved_1f1b", 3, 2, 3, policy="plain", forward_only=True))
    programs = [
        "F0.0 SEND_F0.0 RECV_F1.0 WAIT_F1.0 F1.0 SEND_F1.0 F0.1 SEND_F0.1 RECV_F1.1 WAIT_F1.1 F1.1 SEND_F1.1 F0.2 "
        "SEND_F0.2 RECV_F1.2 WAIT_F1.2 F1.2 SEND_F1.2 "
        "FREE_F0.0 FREE_F1.0 FREE_F0.1 FREE_F1.1 FREE_F0.2 FREE_F1.2",
        "RECV_F0.0 WAIT_F0.0 F0.0 SEND_F0.0 RECV_F0.1 WAIT_F0.1 F0.1 SEND_F0.1 RECV_F0.2 WAIT_F0.2 F0.2 SEND_F0.2 "
        "RECV_F1.0 WAIT_F1.0 F1.0 SEND_F1.0 RECV_F1.1 WAIT_F1.1 F1.1 "
        "SEND_F1.1 RECV_F1.2 WAIT_F1.2 F1.2 SEND_F1.2 FREE_F0.0 FREE_F0.1 FREE_F0.2 FREE_F1.0 FREE_F1.1 FREE_F1.2",
        "RECV_F0.0 WAIT_F0.0 F0.0 RECV_F0.1 WAIT_F0.1 F0.1 SEND_F0.0 SEND_F0.1 RECV_F0.2 WAIT_F0.2 F0.2 SEND_F0.2 "
        "RECV_F1.0 WAIT_F1.0 F1.0 RECV_F1.1 WAIT_F1.1 F1.1 "
        "RECV_F1.2 WAIT_F1.2 F1.2 FREE_F0.0 FREE_F0.1 FREE_F0.2",
    ]
    words = refusal(with_programs(plan, *programs))
    assert words.startswith("deadlock under rendezvous: ")
    for part in (
        "rank 0 waits at WAIT_F1.0 for rank 2 to post the send that matches RECV_F1.0",
        "rank 2 waits at WAIT_F0.1 for rank 1 to post the send that matches RECV_F0.1",
        "rank 1 waits at WAIT_F0.1 for rank 0 to post the send that matches RECV_F0.1",
    ):
        assert part in words


def test_verify_names_the_operation_queued_in_front() -> None:
    """On a shared channel, a wait can be held up by what was posted before it: here by a receive posted too early."""
    plan = plan_1f1b(channels="shared")
    verify(plan)
    early = edited(plan, 0, "move RECV_B0.0 before SEND_F0.1")
    words = refusal(early)
    assert words.startswith("deadlock under rendezvous: ")
    assert "matches RECV_B0.0" in words
    verify(edited(plan_1f1b(), 0, "move RECV_B0.0 before SEND_F0.1"))  # harmless where channels are one-way


def test_verify_refuses_messages_that_cross_on_a_channel() -> None:
    plan = with_programs(
        lowered_plan(PlanSpec("gpipe", 2, 1, 2, forward_only=True)),
        "F0.0 F0.1 SEND_F0.1 SEND_F0.0 FREE_F0.0 FREE_F0.1",
        "RECV_F0.0 RECV_F0.1 WAIT_F0.0 F0.0 WAIT_F0.1 F0.1",
    )
    assert refusal(plan) == (
        "rank 1: RECV_F0.0 (receive of the activation of chunk 0, microbatch 0) would receive what rank 0 sends with "
        "SEND_F0.1 (send of the activation of "
        "chunk 0, microbatch 1): messages between them cross"
    )


def test_verify_refuses_programs_in_another_order_than_the_plans_own() -> None:
    plan, other = (lowered_plan(PlanSpec(name, 1, 1, 3)) for name in ("1f1b", "gpipe"))
    words = refusal(replace(plan, programs=other.programs))
    assert words == "rank 0: the plan's order has B0.0 where its program runs F0.1"


def test_verify_refuses_forwards_out_of_the_order_of_the_data_iterator() -> None:
    """The plan has no compute order of its own, and nothing else is wrong with it."""
    plan = replace(lowered_plan(PlanSpec("gpipe", 2, 1, 2, forward_only=True)), orders=())
    receives = "RECV_F0.0 RECV_F0.1 WAIT_F0.0 WAIT_F0.1"
    sends = "F0.0 F0.1 SEND_F0.0 SEND_F0.1 FREE_F0.0 FREE_F0.1"
    verify(with_programs(plan, sends, f"{receives} F0.0 F0.1"))
    assert refusal(with_programs(plan, sends, f"{receives} F0.1 F0.0")) == (
        "rank 1: F0.1 (forward of chunk 0, microbatch 1): the next forward of chunk 0 is that of microbatch 0: the "
        "data iterator gives them in order"
    )


def test_verify_refuses_a_batch_that_waits_for_a_later_batch() -> None:
    """A batch completes as a whole: what is in it together must be answered together."""
    plan = lowered_plan(PlanSpec("1f1b", 2, 1, 2, policy="batched"))
    verify(plan)
    greedy = with_programs(
        plan,
        "F0.0 [SEND_F0.0 RECV_B0.0] FREE_F0.0 WAIT_B0.0 F0.1 [SEND_F0.1] FREE_F0.1 B0.0 [RECV_B0.1] WAIT_B0.1 "
        "ENABLE_GRAD_SYNC0 B0.1",
        "[RECV_F0.0] WAIT_F0.0 F0.0 [RECV_F0.1] WAIT_F0.1 B0.0 [SEND_B0.0] FREE_B0.0 F0.1 ENABLE_GRAD_SYNC0 B0.1 "
        "[SEND_B0.1] FREE_B0.1",
    )
    words = refusal(greedy)
    assert words == (
        "deadlock under rendezvous: rank 0 waits at FREE_F0.0 for rank 1 to post the send that matches RECV_B0.0; "
        "rank 1 waits at WAIT_F0.1 for rank 0 to post the send that matches RECV_F0.1"
    )


def test_verify_refuses_shapes_that_are_read_too_late() -> None:
    """With shapes ahead of tensors, a receive that is posted but not waited holds its channel: what is posted behind it
    cannot be complete before it."""
    plan = lowered_plan(PlanSpec("gpipe", 2, 1, 2, variable_shapes=True, forward_only=True, policy="plain"))
    verify(plan)
    late = with_programs(
        plan, "F0.0 SEND_F0.0 FREE_F0.0 F0.1 SEND_F0.1 FREE_F0.1", "RECV_F0.0 RECV_F0.1 WAIT_F0.0 F0.0 WAIT_F0.1 F0.1"
    )
    assert (
        "rank 1: RECV_F0.1 (receive of the activation of chunk 0, microbatch 1) would receive what rank 0 sends with "
        "SEND_F0.0" in refusal(late)
    )


def test_a_rank_waits_at_a_batch_for_its_shapes() -> None:
    """Rank 0 goes on to the send for which rank 1 waits only once the shapes of its batch are exchanged."""
    sends = "F0.0 [SEND_F0.0] F0.1 SEND_F0.1 FREE_F0.0 FREE_F0.1"
    receives = "RECV_F0.1 WAIT_F0.1 [RECV_F0.0] WAIT_F0.0 F0.0 F0.1"
    fixed, varying = (
        lowered_plan(PlanSpec("gpipe", 2, 1, 2, variable_shapes=v, forward_only=True)) for v in (False, True)
    )
    verify(with_programs(fixed, sends, receives))
    assert refusal(with_programs(varying, sends, receives)).startswith("deadlock under rendezvous: ")


def test_deallocation_changes_the_memory_and_not_the_verdict() -> None:
    plan = lowered_plan(PlanSpec("1f1b", 4, 1, 8))
    with_it, without = verify(plan), verify(plan, deallocate=False)
    assert [peaks.each.outputs for peaks in without.ranks] == [4, 3, 2, 0]
    assert [peaks.each.outputs for peaks in with_it.ranks] == [2, 2, 2, 0]
    assert with_it.ranks[0].each.in_flight == without.ranks[0].each.in_flight
    # Nothing keeps the outputs of an evaluation once they are sent.
    evaluation = replace(plan.spec, forward_only=True)
    assert verify(lowered_plan(evaluation), deallocate=False).ranks == verify(lowered_plan(evaluation)).ranks


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("deallocate", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "vocab_1f1b", "vocab_1f1b_alg1"])
def test_no_tensor_is_alive_at_the_end_of_a_plan(schedule: str, deallocate: bool, forward_only: bool) -> None:
    plan = lowered_plan(PlanSpec(schedule, 4, 2 if schedule == "zb_v" else 1, 8, forward_only=forward_only))
    for rank in range(4):
        walk = LifetimeWalk(plan, rank, deallocate)
        *_, alive = walk.tensors()
        assert alive == 0
        assert not any(walk.now), Memory(*walk.now)
