"""Lowering adds communication to a compute order: cases written by hand, and where every instruction has to stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan, lowered_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import KIND_OF, RESULT_OF, message_of
from megatron_pp.plan.ir.instruction import Instruction, format_program
from megatron_pp.plan.ir.spec import (
    BATCHED,
    CHANNELS,
    ON_NCCL,
    ONE_QUEUE,
    ONE_WAY,
    OVERLAP,
    PLAIN,
    POLICIES,
    SHARED,
    Plan,
    PlanSpec,
)
from megatron_pp.plan.lower.clock import run_clock
from megatron_pp.plan.orders import SCHEDULES, find_family
from megatron_pp.plan.verify.lifetime import LifetimeWalk
from testkit.device_runs.device_waits import hanging_waits, stopped
from testkit.inputs.plan_text import index_of


def lines(*args: int | str, **fields: object) -> list[str]:
    plan = lowered_plan(PlanSpec(*args, **fields))  # type: ignore[arg-type]
    return [format_program(program) for program in plan.programs]


# -- written by hand --------------------------------------------------------------------------------------------------

# Rank 1's first gradient is due when rank 0 has run F0.1: both are exchanged at that boundary, receives first.
PLAIN_BY_HAND = [
    "F0.0 SEND_F0.0 FREE_F0.0 F0.1 RECV_B0.0 SEND_F0.1 WAIT_B0.0 FREE_F0.1 B0.0 RECV_B0.1 WAIT_B0.1 "
    "ENABLE_GRAD_SYNC0 B0.1",
    "RECV_F0.0 WAIT_F0.0 F0.0 RECV_F0.1 WAIT_F0.1 B0.0 SEND_B0.0 FREE_B0.0 F0.1 ENABLE_GRAD_SYNC0 B0.1 SEND_B0.1 "
    "FREE_B0.1",
]
# The same exchange, grouped.
BATCHED_BY_HAND = [
    "F0.0 [SEND_F0.0] FREE_F0.0 F0.1 [RECV_B0.0 SEND_F0.1] WAIT_B0.0 FREE_F0.1 B0.0 [RECV_B0.1] WAIT_B0.1 "
    "ENABLE_GRAD_SYNC0 B0.1",
    "[RECV_F0.0] WAIT_F0.0 F0.0 [RECV_F0.1] WAIT_F0.1 B0.0 [SEND_B0.0] FREE_B0.0 F0.1 ENABLE_GRAD_SYNC0 B0.1 "
    "[SEND_B0.1] FREE_B0.1",
]
# Receives one slot ahead of their use, idle ones counted, releases one operation after their send, or before the
# backward. Rank 0 idles before both of its backwards.
OVERLAP_BY_HAND = [
    "F0.0 SEND_F0.0 F0.1 RECV_B0.0 SEND_F0.1 FREE_F0.0 WAIT_B0.0 B0.0 RECV_B0.1 FREE_F0.1 WAIT_B0.1 "
    "ENABLE_GRAD_SYNC0 B0.1",
    "RECV_F0.0 WAIT_F0.0 F0.0 RECV_F0.1 B0.0 SEND_B0.0 WAIT_F0.1 F0.1 FREE_B0.0 ENABLE_GRAD_SYNC0 B0.1 SEND_B0.1 "
    "FREE_B0.1",
]
# A receive is complete only when its shape has come: it is posted at its round, and waited at that boundary.
SHAPES_AHEAD_BY_HAND = [
    "F0.0 SEND_F0.0 F0.1 RECV_B0.0 SEND_F0.1 WAIT_B0.0 FREE_F0.0 B0.0 RECV_B0.1 WAIT_B0.1 FREE_F0.1 "
    "ENABLE_GRAD_SYNC0 B0.1",
    "RECV_F0.0 WAIT_F0.0 F0.0 RECV_F0.1 WAIT_F0.1 B0.0 SEND_B0.0 F0.1 FREE_B0.0 ENABLE_GRAD_SYNC0 B0.1 SEND_B0.1 "
    "FREE_B0.1",
]
# Rank 1's next receive is posted behind the wait of the one before.
FORWARD_ONLY_BY_HAND = [
    "F0.0 SEND_F0.0 F0.1 SEND_F0.1 FREE_F0.0 F0.2 SEND_F0.2 FREE_F0.1 FREE_F0.2",
    "RECV_F0.0 WAIT_F0.0 RECV_F0.1 F0.0 WAIT_F0.1 RECV_F0.2 F0.1 WAIT_F0.2 F0.2",
]


@pytest.mark.parametrize(
    ("microbatches", "fields", "programs"),
    [
        (2, {"policy": PLAIN}, PLAIN_BY_HAND),
        (2, {"policy": BATCHED}, BATCHED_BY_HAND),
        (2, {"policy": OVERLAP}, OVERLAP_BY_HAND),
        (2, {"policy": OVERLAP, "variable_shapes": True}, SHAPES_AHEAD_BY_HAND),
        (3, {"policy": OVERLAP, "forward_only": True}, FORWARD_ONLY_BY_HAND),
    ],
)
def test_1f1b_of_two_ranks_by_hand(microbatches: int, fields: dict[str, object], programs: list[str]) -> None:
    assert lines("1f1b", 2, 1, microbatches, **fields) == programs


def test_an_output_whose_backward_is_next_is_released_behind_the_wait_for_its_gradient() -> None:
    """The gradient shows that the send is done, so the release waits for nothing more."""
    program = lines("1f1b", 2, 1, 1)[0]
    assert program == "F0.0 RECV_B0.0 SEND_F0.0 WAIT_B0.0 FREE_F0.0 ENABLE_GRAD_SYNC0 B0.0"


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_of_one_rank_exchange_tensors_by_hand_offs(policy: str) -> None:
    assert lines("breadth_first", 1, 2, 2, policy=policy) == [
        "F0.0 F0.1 HAND_F1.0 F1.0 HAND_F1.1 F1.1 B1.0 ENABLE_GRAD_SYNC1 B1.1 HAND_B0.0 B0.0 HAND_B0.1 "
        "ENABLE_GRAD_SYNC0 B0.1"
    ]


def test_without_a_pipeline_the_sync_opens_before_the_last_forward() -> None:
    assert lines("1f1b", 1, 1, 2) == ["F0.0 B0.0 ENABLE_GRAD_SYNC0 F0.1 B0.1"]


# -- where every instruction has to stand -----------------------------------------------------------------------------


def specs(policy: str) -> Iterator[PlanSpec]:
    for schedule, p, v, m, g in [
        ("1f1b", 1, 1, 3, 0),
        ("1f1b", 2, 1, 5, 0),
        ("1f1b", 4, 1, 3, 0),
        ("gpipe", 3, 1, 4, 0),
        ("interleaved_1f1b", 2, 2, 4, 0),
        ("interleaved_1f1b", 2, 3, 6, 3),
        ("interleaved_1f1b", 4, 2, 9, 4),
        ("interleaved_1f1b", 1, 3, 2, 0),
        ("breadth_first", 3, 2, 4, 0),
    ]:
        for channels in CHANNELS:
            for variable in (False, True):
                for forward_only in (False, True):
                    yield PlanSpec(schedule, p, v, m, g, policy, channels, forward_only, variable)


def use_of(program: Sequence[Instruction], post: Instruction) -> int:
    """Where the operation stands that makes what ``post`` sends, or needs what it receives."""
    wanted = (KIND_OF[post.op], *post[1:3])
    return next(i for i, at in enumerate(program) if (RESULT_OF.get(at.op), *at[1:3]) == wanted)


def flat(program: tuple[Instruction, ...]) -> list[Instruction]:
    return [one for at in program for one in at.members or (at,)]


def compute_index(program: list[Instruction]) -> list[int]:
    """Per instruction, how many compute operations stand before it."""
    before, result = 0, []
    for at in program:
        result.append(before)
        before += at.op in ins.COMPUTE_OPS
    return result


FINISHES = {ins.RECV_F: ins.WAIT_F, ins.RECV_B: ins.WAIT_B}
FINISHES |= {ins.SEND_F: ins.FREE_F, ins.SEND_B: ins.FREE_B}


@pytest.mark.parametrize("policy", POLICIES)
def test_sends_follow_the_operation_that_makes_their_message(policy: str) -> None:
    """Or behind the backward that follows, where the two have one exchange."""
    for spec in specs(policy):
        blocks = policy != OVERLAP or spec.variable_shapes
        joint = blocks and find_family(spec.schedule).joint(spec.shape)
        for program in map(flat, lowered_plan(spec).programs):
            index = compute_index(program)
            computes = [at for at in program if at.op in ins.COMPUTE_OPS]
            for i, at in enumerate(program):
                if at.op in ins.SEND_OPS:
                    made = index[use_of(program, at)]
                    two = "".join(one.op for one in computes[made : made + 2])
                    assert index[i] == made + (2 if joint and two == ins.FORWARD + ins.BACKWARD else 1), (spec, at)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BATCHED, PLAIN])
def test_batched_and_plain_wait_at_the_boundary_where_they_post(policy: str) -> None:
    for spec in specs(policy):
        for program in map(flat, lowered_plan(spec).programs):
            index = compute_index(program)
            for i, at in enumerate(program):
                if at.op in FINISHES:
                    assert index[index_of(program, f"{FINISHES[at.op]}{at.chunk}.{at.mb}")] == index[i], (spec, at)


@pytest.mark.parametrize("policy", POLICIES)
def test_receives_are_posted_before_the_sends_of_their_boundary(policy: str) -> None:
    """gloo announces a receive behind the data that goes the other way; shared channels have an order of their own."""
    for spec in specs(policy):
        if spec.variable_shapes or (spec.channels == SHARED and policy != BATCHED):
            continue
        for program in lowered_plan(spec).programs:
            for posts in posted_together(program):
                kinds = [at.op in ins.SEND_OPS for at in posts]
                assert kinds == sorted(kinds), (spec, posts)


def posted_together(program: Sequence[Instruction]) -> list[list[Instruction]]:
    """Runs of posts with nothing between them; the members of a batch."""
    runs: list[list[Instruction]] = [[]]
    for at in program:
        if at.members:
            runs.append(list(at.members))
        elif at.op in ins.SEND_OPS or at.op in ins.RECV_OPS:
            runs[-1].append(at)
        else:
            runs.append([])
    return runs


def test_batched_posts_nothing_singly_and_the_others_post_no_batch() -> None:
    for spec in specs(BATCHED):
        for program in lowered_plan(spec).programs:
            assert not [at for at in program if at.op in ins.POST_OPS]
            boundary, batches = compute_index(list(program)), [i for i, at in enumerate(program) if at.op == ins.BATCH]
            if not spec.variable_shapes:  # one call per boundary
                assert len({boundary[i] for i in batches}) == len(batches)
    for policy in (OVERLAP, PLAIN):
        assert not [at for spec in specs(policy) for p in lowered_plan(spec).programs for at in p if at.op == ins.BATCH]


@pytest.mark.parametrize("device", [(), ON_NCCL])
@pytest.mark.parametrize("release_after", [1, 2, 5])
def test_overlap_releases_some_operations_after_the_send(release_after: int, device: tuple[str, ...]) -> None:
    """And one more, half of the ranks, where its receiver uses the message later than it could."""
    plan = lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 6, release_after=release_after, device=device))
    ends = run_clock(plan.orders, plan.placement).result_ends
    seen = late = 0
    for program in map(flat, plan.programs):
        index = compute_index(program)
        for i, at in enumerate(program):
            if at.op not in ins.SEND_OPS:
                continue
            kind, target = ("F", at.stage + 1) if at.op == ins.SEND_F else ("B", at.stage - 1)
            part = at.mb, at.part
            is_late = ends[kind, target][part] - 1 > ends[kind, at.stage][part]
            wanted = min(index[i] + release_after + is_late, index[-1] + 1)
            if at.op == ins.SEND_F:  # but before its own backward, by which the send is done
                wanted = min(wanted, index[index_of(program, f"B{at.chunk}.{at.mb}")])
            released = index[index_of(program, f"{FINISHES[at.op]}{at.chunk}.{at.mb}")]
            assert min(released, index[-1]) == min(wanted, index[-1]), at
            seen += 1
            late += is_late
    assert 0 < late < seen
    assert seen == 2 * 6 * 3  # three of four borders between stages, activations and gradients


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_overlap_posts_receives_ahead_and_waits_right_before_the_use(lookahead: int) -> None:
    """Ahead of its use, but not of the wait before it on its channel, nor of what its message comes from, unless it is
    due."""
    spec = PlanSpec("interleaved_1f1b", 4, 2, 8, lookahead=lookahead)
    plan, without = lowered_plan(spec), lowered_plan(replace(spec, lookahead=0)).programs
    for rank, (program, late) in enumerate(zip(map(flat, plan.programs), map(flat, without), strict=True)):
        index = compute_index(program)
        due = dict(zip(late, compute_index(late), strict=True))
        waited: dict[tuple[str, int], int] = {}
        for i, at in enumerate(program):
            if at.op in ins.WAIT_OPS:
                waited[KIND_OF[at.op], at.peer] = index[i]
            elif at.op in ins.RECV_OPS:
                use = index[use_of(program, at)]
                earliest = max(use - lookahead, waited.get((KIND_OF[at.op], at.peer), 0))
                assert index[i] <= earliest or index[i] == due[at] or comes_from(plan, rank, i, at), at
                assert index[index_of(program, f"{FINISHES[at.op]}{at.chunk}.{at.mb}")] == use, at


def comes_from(plan: Plan, rank: int, position: int, receive: Instruction) -> bool:
    """Whether the message of ``receive`` is not sent while ``rank`` stays in front of the last compute before
    ``position``."""
    program = plan.programs[rank]
    last = max(k for k in range(position) if program[k].op in ins.COMPUTE_OPS)
    run, sends = stopped(plan, rank, last), plan.programs[receive.peer]
    wanted = message_of(receive)
    sent = next(k for k, at in enumerate(sends) if at.op in ins.SEND_OPS and message_of(at) == wanted)
    return run.at[receive.peer] <= sent


@pytest.mark.parametrize("schedule", [name for name, family in SCHEDULES.items() if family.search is None])
def test_a_rank_that_waits_alone_for_its_device_ends(schedule: str) -> None:
    """Nothing is posted ahead of an operation that its message depends on, as where a kernel is launched first."""
    family = SCHEDULES[schedule]
    for size, microbatches in ((2, 4), (3, 6), (4, 8)):
        slices = 2 if family.sliced else 1
        chunks = family.chunks or 2
        spec = PlanSpec(schedule, size, chunks, microbatches, slices=slices, device=(ONE_QUEUE,))
        assert hanging_waits(lowered_plan(spec)) == []


@pytest.mark.parametrize("schedule", ["gis", "breadth_first", "1f1b_v"])
def test_a_rank_that_waits_alone_ends_where_a_message_depends_on_a_pair(schedule: str) -> None:
    """The message depends on the inputs of both halves."""
    for size, microbatches in ((2, 4), (3, 6)):
        spec = PlanSpec(schedule, size, 2, microbatches, device=(ONE_QUEUE,), overlap_pairs=True)
        plan = lowered_plan(spec)
        assert any(at.op in ins.JOINED_OPS for program in plan.programs for at in program)
        assert hanging_waits(plan) == []


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_first_rank_holds_one_output_and_one_gradient_in_a_backward(p: int) -> None:
    """No buffer for the next gradient stands ready while that one cannot come: its sender has a forward to do."""
    plan = lowered_plan(PlanSpec("1f1b", p, 1, 2 * p + 1))
    program = flat(plan.programs[0])
    held = list(LifetimeWalk(plan, 0).tensors())
    before_backwards = [held[i - 1] for i, at in enumerate(program) if at.op == ins.BACKWARD]
    assert max(before_backwards) == 2


def test_shared_channels_never_look_ahead() -> None:
    """Both ends of a shared channel must post in one order: more lookahead changes nothing."""
    near = lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, channels="shared", lookahead=0))
    far = lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, channels="shared", lookahead=5))
    assert near.programs == far.programs


# -- what identifies a plan -------------------------------------------------------------------------------------------


def test_a_plan_is_built_once() -> None:
    assert build_plan(PlanSpec("1f1b", 2, 1, 4)) is build_plan(PlanSpec("1f1b", 2, 1, 4))
    assert build_plan(PlanSpec("1f1b", 2, 1, 4)) is not build_plan(PlanSpec("1f1b", 2, 1, 4, policy=PLAIN))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy": "late"}, "lowering policy 'late' is not known; it is one of overlap, batched, plain"),
        ({"channels": "own"}, "channels 'own' is not known; it is one of one_way, shared"),
        ({"grad_sync": "never"}, "grad_sync 'never' is not known; it is one of hooks, explicit"),
        ({"num_microbatches": 0}, "number of microbatches is 0; it must be a whole number of at least 1"),
        ({"pipeline_size": True}, "pipeline size is True; it must be a whole number of at least 1"),
        (
            {"num_microbatches": 10**8},
            "pipeline size 2, 1 model chunks and 100000000 microbatches make 200,000,000 forwards; "
            "a plan has at most 100,000,000",
        ),
        ({"group_size": -1}, "group size is -1; it must be a whole number of at least 0"),
        ({"release_after": 0}, "release_after is 0; it must be a whole number of at least 1"),
        ({"lookahead": -1}, "lookahead is -1; it must be a whole number of at least 0"),
    ],
)
def test_impossible_specs_are_refused(fields: dict[str, object], words: str) -> None:
    good = {"schedule": "1f1b", "pipeline_size": 2, "num_chunks": 1, "num_microbatches": 4, "channels": ONE_WAY}
    with pytest.raises(PlanError) as caught:
        PlanSpec(**{**good, **fields})  # type: ignore[arg-type]
    assert str(caught.value) == words
