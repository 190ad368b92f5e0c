"""Overlapped pairs: a forward and the full backward of another microbatch that run as one
(``overlapped_forward_backward``).

DualPipeV's phases 4 and 5 are made of them, and Megatron's combined 1F1B too: the all-to-alls of one half hide behind
the other's compute. A pair starts when both inputs are there, and both its outputs are there when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pp.plan.instruction import Instruction, may_pair, pair


def pair_up(order: Sequence[Instruction]) -> list[Instruction]:
    """The order with every forward that stands right before a full backward of another microbatch joined to it.

    Backwards that leave their weight gradient for later are short already and stay alone.
    """
    paired: list[Instruction] = []
    for at in order:
        if paired and may_pair(paired[-1], at):
            paired[-1] = pair(paired[-1], at)
        else:
            paired.append(at)
    return paired
