"""One rule for each op: when its instruction is valid in a rank's program.

A *cell* is one (stage, microbatch) on its rank, or a message of it that has a name. Its facts are bits. An instruction
needs some facts, must not find its own fact or one that bars it, and adds its own fact. ``facts_at_end`` are the facts
of each cell of a finished program. They mean that every handle was waited for exactly once and nothing stays alive.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_pp.feature_table import FEATURES
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.feature import feature_of, hooks_of, rows_of
from megatron_pp.plan.ir.placement import Placement

F_POSTED, F_HERE, F_RAN, F_SENT, F_FREED = 1, 2, 4, 8, 16
B_POSTED, B_HERE, B_RAN, B_SENT, B_FREED = 32, 64, 128, 256, 512
W_LEFT, W_RAN = 1024, 2048

_WORDS = {
    F_POSTED: "the receive of its input was posted",
    F_HERE: "its input is there",
    F_RAN: "its forward ran",
    F_SENT: "its output was sent",
    F_FREED: "its output was released",
    B_POSTED: "the receive of its output gradient was posted",
    B_HERE: "its output gradient is there",
    B_RAN: "its backward ran",
    B_SENT: "its input gradient was sent",
    B_FREED: "its input gradient was released",
    W_LEFT: "its backward left the weight gradients",
    W_RAN: "its weight gradients ran",
}


class Rule(NamedTuple):
    """The facts that an instruction needs, adds, and is barred by.

    may   added facts that only some cells of a training plan have
    then  operation -> the facts that it needs instead, once this instruction has run
    """

    needs: int
    adds: int
    bars: int = 0
    may: int = 0
    then: tuple[frozenset[str], int] = (frozenset(), 0)


RULES = {
    ins.RECV_F: Rule(0, F_POSTED),  # once per input from another rank, before its WAIT
    ins.WAIT_F: Rule(F_POSTED, F_HERE),  # once per posted receive, before the forward
    ins.HAND_F: Rule(0, F_HERE),  # once per input from this rank, after the forward of the stage before
    ins.FORWARD: Rule(F_HERE, F_RAN),  # once, after the input is there, microbatches of a chunk in order
    ins.SEND_F: Rule(F_RAN, F_SENT),  # once per output for another rank, after the forward
    ins.FREE_F: Rule(F_SENT, F_FREED),  # once per sent output: waits for the send, then deallocates
    ins.RECV_B: Rule(0, B_POSTED),  # once per output gradient from another rank, before its WAIT
    ins.WAIT_B: Rule(B_POSTED, B_HERE),  # once per posted receive, before the backward
    ins.HAND_B: Rule(0, B_HERE),  # once per output gradient from this rank, after the backward of the stage after
    ins.BACKWARD: Rule(F_RAN | B_HERE, B_RAN),  # once, after the forward and the output gradient; or I and W instead
    ins.INPUT_GRAD: Rule(F_RAN | B_HERE, B_RAN | W_LEFT, may=W_LEFT),  # as B, with a W of the same microbatch after it
    ins.WEIGHT_GRAD: Rule(W_LEFT, W_RAN, may=W_RAN),  # once per I, after it
    ins.SEND_B: Rule(B_RAN, B_SENT),  # once per input gradient for another rank, after the backward
    ins.FREE_B: Rule(B_SENT, B_FREED),  # once per sent input gradient: waits for the send, then drops it
}


def rule_of(op: str) -> Rule | None:
    """The rule of ``op``; None if it has none, as a sync."""
    feature = feature_of(op)
    return (RULES if feature is None else feature.rules).get(op)


def needs_at(op: str, needs: int, stage: int, placement: Placement) -> int:
    """The part of a rule's ``needs`` that holds at ``stage``. The first stage waits for no input. The last stage waits
    for a gradient only if collectives bring one.
    """
    last = placement.num_stages - 1
    needs &= ~(F_HERE if stage == 0 else 0) & ~(B_HERE if stage == last else 0)
    if placement.barriers and stage == last:
        for hooks in hooks_of((), placement.barriers):
            needs = hooks.needs_at_root(op, needs, placement.barriers)
    return needs


def facts_at_end(placement: Placement, stage: int, forward_only: bool) -> int:
    """The facts that every cell of ``stage`` must have after the step; of weight gradients that were left, W too."""
    facts = F_RAN
    if stage > 0:
        remote = placement.crosses_ranks(stage - 1)
        facts |= F_HERE | (F_POSTED if remote else 0)
        if not forward_only and remote:
            facts |= B_SENT | B_FREED
    if stage < placement.num_stages - 1:
        remote = placement.crosses_ranks(stage)
        facts |= (F_SENT | F_FREED) if remote else 0
        if not forward_only:
            facts |= B_HERE | (B_POSTED if remote else 0)
    for hooks in hooks_of((), placement.barriers) if placement.barriers else ():
        facts |= hooks.facts_at_end(placement, forward_only)
    return facts if forward_only else facts | B_RAN


def words_of(facts: int) -> Iterator[str]:
    """Each fact in words."""
    words = dict(_WORDS)
    if facts >= 2 * W_RAN:
        for row in FEATURES:
            words |= rows_of(row.rows).facts if row.rows else {}
    return (word for fact, word in words.items() if facts & fact)
