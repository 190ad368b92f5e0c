"""The instruction set of a pipeline plan: every instruction prints as it parses.

``F0.3`` is the forward of chunk 0, microbatch 3; ``SEND_F0.3`` the send of its output; ``GRAD_SYNC1`` the gradient sync
of chunk 1 (no microbatch); ``[SEND_F0.3 RECV_B0.2]`` a batch, whose sends and receives go out as one grouped call;
``(F0.3 B1.2)`` operations that a feature joins, which run as one, and ``(F0.3 SEND_F0.3 B1.2 SEND_B1.2)`` the same with
sends that go out within it. The part or the name of a message follows the microbatch: ``F0.3s1``, ``SEND_F0.3:skip``,
``DROP0.3:skip``.

A *part* is one of several into which a feature divides every microbatch. Each part passes through the pipeline by
itself: operations and messages are of one part, and forwards run from the first to the last.

A text names the chunk on its rank (Megatron's ``vp_stage``). ``Placement.place`` adds what follows from the rank: the
stage, and the peer of a communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from megatron_pp import feature_table
from megatron_pp.errors import InstructionError, PlanError
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.feature import feature_of, of_kind

# Compute.
FORWARD = "F"  # run the chunk; on the last stage also the loss function
BACKWARD = "B"  # input and weight gradients
INPUT_GRAD = "I"  # input gradients only; the weight gradients are left for W
WEIGHT_GRAD = "W"  # the weight gradients that I left
# Activations, from a stage to the one after it.
RECV_F = "RECV_F"  # allocate the buffer and post the receive of the stage's input; never blocks
WAIT_F = "WAIT_F"  # wait for that receive
SEND_F = "SEND_F"  # post the send of the stage's output; never blocks
FREE_F = "FREE_F"  # wait for that send, then deallocate the output
HAND_F = "HAND_F"  # the stage's input is the output of the stage before, on this same rank
# Gradients, from a stage to the one before it.
RECV_B = "RECV_B"
WAIT_B = "WAIT_B"
SEND_B = "SEND_B"
FREE_B = "FREE_B"  # wait for that send, then drop the input gradient
HAND_B = "HAND_B"
# The places where Megatron's hooks are called. They have a chunk, no microbatch.
PARAM_SYNC = "PARAM_SYNC"  # config.param_sync_func[chunk]
ENABLE_GRAD_SYNC = "ENABLE_GRAD_SYNC"  # leave no_sync for the next B, I or W of the chunk: DDP hooks fire in it
GRAD_SYNC = "GRAD_SYNC"  # config.grad_sync_func[chunk]
# Several sends and receives as one grouped call.
BATCH = "BATCH"

BACKWARD_OPS = frozenset({BACKWARD, INPUT_GRAD})  # ops that make an input gradient
GRADIENT_OPS = frozenset({BACKWARD, WEIGHT_GRAD})  # ops that complete weight gradients
PASSES = tuple(op for op, row in feature_table.FEATURE_OPS.items() if row.kind == feature_table.PASS)
PASS_OPS = frozenset(PASSES)
LAST_PASS = frozenset(PASSES[-1:])  # the pass that completes the weight gradients of the layer on every rank
SINGLE_COMPUTE_OPS = frozenset({FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD}) | PASS_OPS
JOINED_OPS = of_kind(feature_table.JOINED)  # ops for operations that run as one, with sends that go out within them
COMPUTE_OPS = SINGLE_COMPUTE_OPS | JOINED_OPS
SEND_OPS = frozenset({SEND_F, SEND_B})
RECV_OPS = frozenset({RECV_F, RECV_B})
WAIT_OPS = frozenset({WAIT_F, WAIT_B})
FREE_OPS = frozenset({FREE_F, FREE_B})
HAND_OPS = frozenset({HAND_F, HAND_B})
GATHERS = of_kind(feature_table.GATHER)
SCATTERS = of_kind(feature_table.SCATTER)
REPLICA_POSTS = GATHERS | SCATTERS
STAGE_OPS = REPLICA_POSTS | of_kind(feature_table.REPLICA_WAIT, feature_table.STAGE_RELEASE)
RANKWIDE_OPS = PASS_OPS | of_kind(feature_table.COLLECTIVE, feature_table.COLLECTIVE_WAIT)
COLLECTIVE_POSTS = of_kind(feature_table.COLLECTIVE) | REPLICA_POSTS
COLLECTIVE_WAITS = of_kind(feature_table.COLLECTIVE_WAIT, feature_table.REPLICA_WAIT)
COLLECTIVE_OPS = COLLECTIVE_POSTS | COLLECTIVE_WAITS
SYNC_OPS = frozenset({PARAM_SYNC, ENABLE_GRAD_SYNC, GRAD_SYNC})
CHUNK_OPS = SYNC_OPS | STAGE_OPS  # have no microbatch
COPIES_TO_HOST = of_kind(feature_table.TO_HOST)
COPIES_FROM_HOST = of_kind(feature_table.FROM_HOST)
COPY_POST_OPS = COPIES_TO_HOST | COPIES_FROM_HOST
COPY_OPS = COPY_POST_OPS | of_kind(feature_table.COPY_WAIT)
RELEASE_OPS = of_kind(feature_table.RELEASE)
POST_OPS = SEND_OPS | RECV_OPS
TRANSFER_OPS = POST_OPS | WAIT_OPS | FREE_OPS
GROUP_OPS = JOINED_OPS | {BATCH}
SINGLE_OPS = SINGLE_COMPUTE_OPS | TRANSFER_OPS | HAND_OPS | COLLECTIVE_OPS | CHUNK_OPS | COPY_OPS | RELEASE_OPS
ALL_OPS = SINGLE_OPS | GROUP_OPS

POST_OF = {
    WAIT_F: RECV_F,
    WAIT_B: RECV_B,
    FREE_F: SEND_F,
    FREE_B: SEND_B,
    **{op: row.post for op, row in feature_table.FEATURE_OPS.items() if op in COLLECTIVE_WAITS},
}
"""WAIT or FREE of a message or a collective -> the post that it waits for."""

FINISHED_BY = {post: finish for finish, post in POST_OF.items()}
"""Post -> the WAIT or FREE that waits for it."""

COPY_OF = {op: row.post for op, row in feature_table.FEATURE_OPS.items() if row.kind == feature_table.COPY_WAIT}
"""WAIT -> the copy between device and host that it waits for."""

SENT_BY = {FORWARD: SEND_F, BACKWARD: SEND_B}
"""Operation -> the instruction that sends its result."""

NONE = -1  # a stage that is not placed, no microbatch, no peer, no part
_new = tuple.__new__  # takes a third of the time of Instruction(...)
BRACKETS = {BATCH: ("[", "]"), **dict.fromkeys(JOINED_OPS, ("(", ")"))}


class Instruction(NamedTuple):
    """One step of one rank's program.

    op       one of ALL_OPS
    stage    global stage, from 0; NONE until the instruction is placed
    mb       microbatch; NONE for CHUNK_OPS and groups
    peer     for TRANSFER_OPS the pipeline rank at the other end; else NONE
    chunk    model chunk on its rank
    part     part of the microbatch; NONE if microbatches are whole
    tensor   name of the tensor that is moved; empty where an edge has one tensor
    members  the instructions in one of GROUP_OPS
    """

    op: str
    stage: int = NONE
    mb: int = NONE
    peer: int = NONE
    chunk: int = 0
    part: int = NONE
    tensor: str = ""
    members: tuple[Instruction, ...] = ()

    def __str__(self) -> str:
        if self.members:
            opening, closing = BRACKETS[self.op]
            return opening + " ".join(map(str, self.members)) + closing
        text = f"{self.op}{self.chunk}"
        if self.mb >= 0:
            text += f".{self.mb}"
        if self.part >= 0:
            text += f"s{self.part}"
        return f"{text}:{self.tensor}" if self.tensor else text

    def __repr__(self) -> str:
        return str(self)

    @property
    def name(self) -> str:
        """In words, for error messages: ``forward of chunk 0, microbatch 3``."""
        text: str = load("instruction_text").name_of(self)
        return text

    @property
    def where(self) -> str:
        """The chunk and microbatch in words: ``chunk 0, microbatch 3``."""
        text: str = load("instruction_text").where_of(self)
        return text


def refusal(rank: int, at: Instruction, why: str) -> PlanError:
    """The error that ``at`` of ``rank`` is refused."""
    return PlanError(f"rank {rank}: {at} ({at.name}): {why}")


@lru_cache(maxsize=1 << 18)
def instruction(op: str, chunk: int, mb: int = NONE, part: int = NONE) -> Instruction:
    """``op`` of (chunk, mb), or of its ``part``, not placed. Equal instructions are one object."""
    return Instruction(op, mb=mb, chunk=chunk, part=part)


def placed(op: str, stage: int, mb: int, peer: int, chunk: int, part: int = NONE, tensor: str = "") -> Instruction:
    """The instruction with these fields."""
    return _new(Instruction, (op, stage, mb, peer, chunk, part, tensor, ()))


def later(at: Instruction, microbatches: int) -> Instruction:
    """``at`` with a microbatch later by ``microbatches``; unchanged if it has no microbatch."""
    op, stage, mb, peer, chunk, part, tensor, members = at
    if members:
        members = tuple(later(member, microbatches) for member in members)
    if mb != NONE:
        mb += microbatches
    return _new(Instruction, (op, stage, mb, peer, chunk, part, tensor, members))


def batch(members: Iterable[Instruction]) -> Instruction:
    """The sends and receives in ``members`` as one grouped call. Raises InstructionError for anything else."""
    inside = tuple(members)
    wrong = [m for m in inside if m.op not in POST_OPS]
    if wrong or not inside:
        raise InstructionError(f"a batch holds sends and receives only, and at least one; found {wrong or 'none'}")
    return Instruction(BATCH, members=inside)


def joined(op: str, members: Iterable[Instruction]) -> Instruction:
    """The members as one instruction of JOINED_OPS. Raises InstructionError for members that it cannot have."""
    inside = tuple(members)
    rows = feature_of(op)
    assert rows is not None
    assert rows.check_members is not None
    rows.check_members(inside)
    return Instruction(op, members=inside)


def operations(at: Instruction) -> tuple[Instruction, ...]:
    """The operations of a joined instruction, without sends. Any other instruction is returned as it is."""
    return tuple(m for m in at.members if m.op in SINGLE_COMPUTE_OPS) if at.op in JOINED_OPS else (at,)


def join(
    order: Iterable[Instruction], joins: Callable[[Instruction, Instruction], Instruction | None]
) -> list[Instruction]:
    """The order in which two operations in a row are one entry if ``joins`` returns an instruction for them."""
    found: list[Instruction] = []
    for at in order:
        both = joins(found[-1], at) if found else None
        if both is None:
            found.append(at)
        else:
            found[-1] = both
    return found


def each(program: Iterable[Instruction]) -> Iterator[Instruction]:
    """The program with the members of each group in its place."""
    return (one for at in program for one in at.members or (at,))


def numbered(program: Iterable[Instruction]) -> Iterator[tuple[int, Instruction]]:
    """As ``each``; every instruction comes with the index of the entry that holds it."""
    return ((i, one) for i, at in enumerate(program) for one in at.members or (at,))


def unjoined(program: Iterable[Instruction]) -> Iterator[Instruction]:
    """The program with the members of each joined instruction in its place: operations, and their sends."""
    return (one for at in program for one in (at.members if at.op in JOINED_OPS else (at,)))


def format_program(program: Iterable[Instruction]) -> str:
    """One rank's program as one line."""
    return " ".join(map(str, program))
