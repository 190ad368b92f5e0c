"""What an operation depends on, and which message an instruction moves on which channel. Everything that follows a plan
(lowering, clock, lifetime, rendezvous, simulator, search, drawings) asks here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatron_pp.plan.instruction import (
    BACKWARD,
    FORWARD,
    FREE_B,
    FREE_F,
    HAND_B,
    HAND_F,
    INPUT_GRAD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WAIT_B,
    WAIT_F,
    WEIGHT_GRAD,
    Instruction,
)

Result = tuple[str, int]  # what an operation leaves, FORWARD (an output) or BACKWARD (an input gradient), and its stage

RESULT_OF = {FORWARD: FORWARD, BACKWARD: BACKWARD, INPUT_GRAD: BACKWARD}
"""What an operation leaves for other stages; a weight gradient leaves nothing."""

TOWARDS = {FORWARD: 1, BACKWARD: -1}
"""Stages that a result travels."""


class Moves(NamedTuple):
    """The instructions that move a result from one stage to the next."""

    recv: str
    wait: str
    hand: str
    send: str
    free: str


MOVES = {
    FORWARD: Moves(RECV_F, WAIT_F, HAND_F, SEND_F, FREE_F),
    BACKWARD: Moves(RECV_B, WAIT_B, HAND_B, SEND_B, FREE_B),
}
KIND_OF = {op: kind for kind, moves in MOVES.items() for op in moves}
"""FORWARD for what moves an activation, BACKWARD for what moves a gradient."""
_AT_RECEIVER = frozenset({RECV_F, WAIT_F, HAND_F, RECV_B, WAIT_B, HAND_B})


@lru_cache(maxsize=1 << 16)
def inputs_of(op: str, stage: int, num_stages: int) -> tuple[Result, ...]:
    """The results, of the same microbatch, that a compute operation of ``stage`` needs before it runs.

    A forward needs the output of the stage before; a backward, whole or of inputs only, its own forward and the input
    gradient of the stage after; a weight gradient its own input gradient.
    """
    if op == WEIGHT_GRAD:
        return ((BACKWARD, stage),)
    result = RESULT_OF[op]
    own = ((FORWARD, stage),) if result == BACKWARD else ()
    source = stage - TOWARDS[result]
    return (*own, (result, source)) if 0 <= source < num_stages else own


@lru_cache(maxsize=1 << 16)
def source_of(op: str, stage: int, num_stages: int) -> int | None:
    """The other stage whose result a compute operation of ``stage`` needs; None where there is none."""
    return next((source for _, source in inputs_of(op, stage, num_stages) if source != stage), None)


@lru_cache(maxsize=1 << 16)
def consumer_of(op: str, stage: int, num_stages: int) -> int | None:
    """The other stage that needs the result of a compute operation of ``stage``; None where there is none."""
    if op not in RESULT_OF:
        return None
    target = stage + TOWARDS[RESULT_OF[op]]
    return target if 0 <= target < num_stages else None


class Message(NamedTuple):
    """One tensor between two stages.

    kind   FORWARD for an activation, BACKWARD for a gradient
    stage  the stage that receives it
    """

    kind: str
    stage: int
    mb: int
    slice: int
    tensor: str


class Channel(NamedTuple):
    """Messages of one kind from one rank to another."""

    source: int
    target: int
    kind: str


def message_of(at: Instruction) -> Message:
    """The message that a send, receive, WAIT, FREE or hand-off is about."""
    kind = KIND_OF[at.op]
    stage = at.stage if at.op in _AT_RECEIVER else at.stage + TOWARDS[kind]
    return Message(kind, stage, at.mb, at.slice, at.tensor)


def channel_of(at: Instruction, rank: int) -> Channel:
    """The channel of that message, where ``at`` is an instruction of ``rank``."""
    kind = KIND_OF[at.op]
    return Channel(at.peer, rank, kind) if at.op in _AT_RECEIVER else Channel(rank, at.peer, kind)


def neighbour_of(op: str, stage: int) -> int:
    """The stage at the other end of a send, receive, WAIT, FREE or hand-off of ``stage``; it may not exist."""
    towards = TOWARDS[KIND_OF[op]]
    return stage - towards if op in _AT_RECEIVER else stage + towards
