"""When an instruction is valid in a rank's program: one rule per op, with what must be true of its *cell* before it and
what is true afterwards.

A cell is one (stage, microbatch) on its rank, or a named tensor of it; its facts are bits. An instruction needs facts,
must not find its own fact there already, nor one that bars it, and adds it. ``facts_at_end`` are what a finished
program leaves of each cell: that every handle is waited exactly once and that nothing stays alive come to just that.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.placement import Placement

F_POSTED, F_HERE, F_RAN, F_SENT, F_FREED = 1, 2, 4, 8, 16
B_POSTED, B_HERE, B_RAN, B_SENT, B_FREED = 32, 64, 128, 256, 512
W_LEFT, W_RAN = 1024, 2048
DROPPED = 4096
X_POSTED, X_HERE, S_RAN, R_POSTED, R_HERE, T_RAN, G_POSTED, G_HERE = (1 << k for k in range(13, 21))
OFFLOADED, OFFLOAD_FREED, LOADED, LOAD_HERE = (1 << k for k in range(21, 25))
MAY_BE = W_LEFT | W_RAN | OFFLOADED | OFFLOAD_FREED | LOADED | LOAD_HERE
"""Facts of some cells of a plan that trains, and not of others."""

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
    X_POSTED: "the broadcast of the last stage's output was posted",
    X_HERE: "the broadcast of the last stage's output is over",
    S_RAN: "its pass S ran",
    R_POSTED: "the all-reduce of its softmax statistics was posted",
    R_HERE: "its softmax statistics are there",
    T_RAN: "its pass T ran",
    G_POSTED: "the reduction of the last output's gradient was posted",
    G_HERE: "the reduction of the last output's gradient is over",
    DROPPED: "it was dropped",
    OFFLOADED: "its offload was posted",
    OFFLOAD_FREED: "its offload was waited for",
    LOADED: "its load was posted",
    LOAD_HERE: "what was offloaded is back",
}


class Rule(NamedTuple):
    """The facts that an instruction needs, those it adds, and those that bar it."""

    needs: int
    adds: int
    bars: int = 0


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
    ins.INPUT_GRAD: Rule(F_RAN | B_HERE, B_RAN | W_LEFT),  # as B, with a W of the same microbatch after it
    ins.WEIGHT_GRAD: Rule(W_LEFT, W_RAN),  # once per I, after it
    ins.SEND_B: Rule(B_RAN, B_SENT),  # once per input gradient for another rank, after the backward
    ins.FREE_B: Rule(B_SENT, B_FREED),  # once per sent input gradient: waits for the send, then drops it
    ins.BROADCAST: Rule(F_RAN, X_POSTED),  # once, after the rank's forward; on the last stage that makes it
    ins.WAIT_BROADCAST: Rule(X_POSTED, X_HERE),  # once per broadcast; before S, on the last stage's rank at any time
    ins.OUTPUT_S: Rule(X_HERE, S_RAN),  # once, after the last stage's output is there
    ins.ALL_REDUCE: Rule(S_RAN, R_POSTED),  # once, after S
    ins.WAIT_ALL_REDUCE: Rule(R_POSTED, R_HERE),  # once per all-reduce, before T; on the last stage's rank in order
    ins.OUTPUT_T: Rule(X_HERE | R_HERE, T_RAN),  # once, after the statistics of all ranks are there
    ins.REDUCE: Rule(T_RAN, G_POSTED),  # once with two barriers, after T
    ins.WAIT_REDUCE: Rule(G_POSTED, G_HERE),  # once per reduction, on the last stage's rank before its backward
    ins.DROP: Rule(0, DROPPED),  # once per named tensor on a rank, when no stage there uses it any more, nor a send
    ins.OFFLOAD: Rule(F_RAN, OFFLOADED, B_RAN),  # once at most, between the forward and its backward
    ins.FREE_OFFLOAD: Rule(OFFLOADED, OFFLOAD_FREED),  # once per OFFLOAD: waits for the copy, then frees the memory
    ins.LOAD: Rule(OFFLOAD_FREED, LOADED),  # once per OFFLOAD, after its release
    ins.WAIT_LOAD: Rule(LOADED, LOAD_HERE),  # once per LOAD, before the backward
}


def obliged(op: str, facts: int) -> int:
    """What an instruction needs besides because of its cell: a backward, that what was offloaded is back."""
    return LOAD_HERE if op in ins.BACKWARD_OPS and facts & OFFLOADED else 0


def needs_at(op: str, stage: int, placement: Placement) -> int:
    """The facts that an instruction of ``stage`` needs: those of its rule, but for the split output layer's last stage.
    It has its own output, and its backward the gradient that collectives bring.
    """
    needs = RULES[op].needs
    if placement.barriers and stage == placement.num_stages - 1:
        if op == ins.OUTPUT_S:
            return X_POSTED
        if op in ins.BACKWARD_OPS:
            return needs | (R_HERE if placement.barriers == 1 else G_HERE)
    return needs


def facts_at_end(placement: Placement, stage: int, forward_only: bool) -> int:
    """What must be true of every cell of ``stage`` after the step; weight gradients that were left must run besides."""
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
    if stage in placement.output_stages:
        facts |= X_POSTED | X_HERE | S_RAN | R_POSTED | R_HERE
        if not forward_only:
            facts |= T_RAN | (G_POSTED | G_HERE if placement.barriers == 2 else 0)
    return facts if forward_only else facts | B_RAN


def facts_in(facts: int) -> Iterator[int]:
    """Each by itself."""
    return (fact for fact in _WORDS if facts & fact)


def words_of(facts: int) -> Iterator[str]:
    """Each fact in words."""
    return map(_WORDS.__getitem__, facts_in(facts))
