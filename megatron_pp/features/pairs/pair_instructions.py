"""The rows of PAIR: a forward and a full backward of another microbatch that run as one."""

from collections.abc import Iterable
from itertools import pairwise

from megatron_pp.errors import InstructionError
from megatron_pp.plan.ir.feature import PlanFeature
from megatron_pp.plan.ir.instruction import (
    BACKWARD,
    FORWARD,
    SENT_BY,
    SINGLE_COMPUTE_OPS,
    Instruction,
    join,
    joined,
)

PAIR = "PAIR"


def pair(*members: Instruction) -> Instruction:
    """The members as one instruction. Raises InstructionError unless they are a forward and the full backward of
    another microbatch, each with nothing behind it or with the send of what it has made."""
    return joined(PAIR, members)


def check_members(members: tuple[Instruction, ...]) -> None:
    two = [at for at in members if at.op in SINGLE_COMPUTE_OPS]
    fits = members[:1] == tuple(two[:1]) and len(two) == 2 and may_pair(*two)
    for before, at in pairwise(members):
        is_its_send = at.op == SENT_BY.get(before.op) and at[1:3] == before[1:3] and at.chunk == before.chunk
        fits = fits and (at.op in SINGLE_COMPUTE_OPS or is_its_send)
    if not fits:
        raise InstructionError(
            f"({' '.join(map(str, members))}) is no pair; it holds a forward and the full backward (B) of another "
            "microbatch, each with at most its own send behind it"
        )


def may_pair(first: Instruction, second: Instruction) -> bool:
    """Whether the two may run as one PAIR."""
    return first.op == FORWARD and second.op == BACKWARD and first.mb != second.mb


def paired(first: Instruction, second: Instruction) -> Instruction | None:
    """A forward and the full backward of another microbatch right behind it as one PAIR, so that the all-to-alls of a
    half hide behind the other one's compute; else None. Backwards without weight gradients are short and stay alone."""
    return Instruction(PAIR, members=(first, second)) if may_pair(first, second) else None


def pair_up(order: Iterable[Instruction]) -> list[Instruction]:
    """The order in which all operations that may form pairs are pairs."""
    return join(order, paired)


ROWS = PlanFeature(
    names={PAIR: "overlapped pair"},
    rules={},
    facts={},
    check_members=check_members,
    outside="what needs the pair's last weight gradient, or a tensor of another operation, stands after or before it",
)
