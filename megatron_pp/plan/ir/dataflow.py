"""Says what an operation depends on, and which message an instruction moves on which channel. Everything that follows a
plan uses it: lowering, the clock, lifetime, rendezvous, the simulator, searches and drawings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Instruction

Result = tuple[str, int]
"""The result of an operation, and its stage: FORWARD (an output), BACKWARD (an input gradient) or one of PASS_OPS."""

RESULT_OF = {FORWARD: FORWARD, BACKWARD: BACKWARD, INPUT_GRAD: BACKWARD}
"""Operation -> its result for other stages; a weight gradient has none."""

TOWARDS = {FORWARD: 1, BACKWARD: -1}
"""Result -> the number of stages that it moves on, negative towards the first stage."""


class Moves(NamedTuple):
    """The instructions that move a result from one stage to the next."""

    recv: str
    wait: str
    hand: str
    send: str
    free: str


MOVES = {
    FORWARD: Moves(ins.RECV_F, ins.WAIT_F, ins.HAND_F, ins.SEND_F, ins.FREE_F),
    BACKWARD: Moves(ins.RECV_B, ins.WAIT_B, ins.HAND_B, ins.SEND_B, ins.FREE_B),
}
KIND_OF = {op: kind for kind, moves in MOVES.items() for op in moves}
"""Instruction -> FORWARD if it moves an activation, BACKWARD if it moves a gradient."""
_AT_RECEIVER = frozenset({*MOVES[FORWARD][:3], *MOVES[BACKWARD][:3]})  # instructions that the receiving stage runs
_TO_RECEIVER = {op: 0 if op in _AT_RECEIVER else TOWARDS[kind] for op, kind in KIND_OF.items()}


@lru_cache(maxsize=1 << 16)
def inputs_of(op: str, stage: int, num_stages: int) -> tuple[Result, ...]:
    """The results of the same microbatch (and part) that a compute operation of ``stage`` needs. A forward needs the
    output of the stage before; a backward (B or I) its own forward and the input gradient of the stage after; a weight
    gradient its own input gradient; a pass nothing.
    """
    if op == WEIGHT_GRAD:
        return ((BACKWARD, stage),)
    result = RESULT_OF.get(op)
    if result is None:
        return ()
    own = ((FORWARD, stage),) if result == BACKWARD else ()
    source = stage - TOWARDS[result]
    return (*own, (result, source)) if 0 <= source < num_stages else own


@lru_cache(maxsize=1 << 16)
def source_of(op: str, stage: int, num_stages: int) -> int | None:
    """The other stage whose result a compute operation of ``stage`` needs; None if there is none."""
    return next((source for _, source in inputs_of(op, stage, num_stages) if source != stage), None)


@lru_cache(maxsize=1 << 16)
def consumer_of(op: str, stage: int, num_stages: int) -> int | None:
    """The other stage that needs the result of a compute operation of ``stage``; None if there is none."""
    if op not in RESULT_OF:
        return None
    target = stage + TOWARDS[RESULT_OF[op]]
    return target if 0 <= target < num_stages else None


class Message(NamedTuple):
    """One tensor between two stages.

    kind   FORWARD for an activation, BACKWARD for a gradient; for a collective, the op that posts it
    stage  the stage that receives it; NONE if every rank does
    """

    kind: str
    stage: int
    mb: int
    part: int
    tensor: str


class Channel(NamedTuple):
    """Messages of one kind from one rank to another."""

    source: int
    target: int
    kind: str


def message_of(at: Instruction) -> Message:
    """The message of a send, receive, WAIT, FREE or hand-off, or the collective of an instruction."""
    op = at.op
    if op in ins.COLLECTIVE_OPS:  # one of all ranks, or of the replicas of one
        stage = at.stage if op in ins.STAGE_OPS else ins.NONE
        return Message(ins.POST_OF.get(op, op), stage, at.mb, at.part, at.tensor)
    fields = (KIND_OF[op], at.stage + _TO_RECEIVER[op], at.mb, at.part, at.tensor)
    return tuple.__new__(Message, fields)  # a hot path: this takes a third of the time of Message(...)


def channel_of(at: Instruction, rank: int) -> Channel:
    """The channel of the message of ``at``, an instruction of ``rank``."""
    kind = KIND_OF[at.op]
    return Channel(at.peer, rank, kind) if at.op in _AT_RECEIVER else Channel(rank, at.peer, kind)


def neighbour_of(op: str, stage: int) -> int:
    """The stage at the other end of a send, receive, WAIT, FREE or hand-off of ``stage``; it may not exist."""
    return stage + (_TO_RECEIVER[op] or -TOWARDS[KIND_OF[op]])
