"""Overlapped slots: a forward and the full backward of another microbatch that run as one
(``overlapped_forward_backward``).

DualPipeV's phases 4 and 5 are made of them, and Megatron's combined 1F1B too: the all-to-alls of one half hide behind
the other's compute. A pair starts when both inputs are there, and both its outputs are there when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pp.plan.instruction import BACKWARD, FORWARD, WEIGHT, Instruction

Pairs = list[
    set[int]
]  # per rank: indices i such that operations i (a forward) and i + 1 (a backward) of its order pair


def overlap_pairs(orders: Sequence[Sequence[Instruction]]) -> Pairs:
    """Every forward that stands right before a full backward of another microbatch, in each rank's order.

    Backwards that leave their weight gradient for later are short already and stay alone.
    """
    return [_of_rank(order) for order in orders]


def _of_rank(order: Sequence[Instruction]) -> set[int]:
    split = {(op.chunk, op.mb) for op in order if op.op == WEIGHT}
    return {i for i in range(len(order) - 1) if is_pair(order[i], order[i + 1], split)}


def is_pair(first: Instruction, second: Instruction, split: set[tuple[int, int]] | frozenset[tuple[int, int]]) -> bool:
    """Whether ``first`` and ``second`` may run together; ``split`` holds the (chunk, microbatch) with a WEIGHT."""
    return (
        first.op == FORWARD
        and second.op == BACKWARD
        and first.mb != second.mb
        and (second.chunk, second.mb) not in split
    )
