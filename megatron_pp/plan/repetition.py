"""Where the steady state of a schedule stands: how many microbatches show it, and which block of a plan it repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_pp.plan.instruction import BACKWARD_OPS, FORWARD, INPUT_GRAD, PAIR, WEIGHT_GRAD, Instruction
from megatron_pp.plan.repeated import Block
from megatron_pp.plan.spec import Plan

_MARGIN = 4  # operations of a rank between its steady state and the block, on either side
_Orders = Iterable[Sequence[Instruction]]


def fewest_microbatches(orders: _Orders, forwards: int, period: int) -> int:
    """How many a plan has at least whose ``orders``, on ranks that run ``forwards`` of each microbatch, one of a chunk
    and slice, stay in their steady state for ``period`` microbatches.
    """
    return -(-(sum(_edges(orders)) + 2 * _MARGIN) // forwards) + period


def steady_block(plan: Plan, period: int, lines: _Orders | None = None) -> Block:
    """``period`` microbatches in the middle of the steady state: a block that ``verify`` may find to be repeatable; of
    the plan's programs, or of ``lines`` in which its ranks run the same compute.

    It is counted in backwards, as many on each rank, or in forwards where the plan has no others.
    """
    each, spare = plan.spec.num_chunks * plan.spec.slices, plan.spec.num_microbatches - period
    if plan.spec.forward_only:
        ops, first = frozenset({FORWARD}), each * spare // 2
    else:
        forwards, backwards = _edges(plan.orders)
        ops, first = BACKWARD_OPS, (each * spare - forwards + backwards) // 2
    counts = first, first + each * period
    starts, ends = zip(*(_positions(line, ops, counts) for line in lines or plan.programs), strict=True)
    return Block(starts, ends, period)


def _edges(orders: _Orders) -> tuple[int, int]:
    """The most that a rank runs before its steady state: forwards before its first backward, and input gradients before
    its first weight gradient.
    """
    forwards = backwards = 0
    for order in orders:
        ops = [at.op for at in order]
        forwards = max(forwards, next((k for k, op in enumerate(ops) if op != FORWARD), len(ops)))
        backwards = max(backwards, (ops[: ops.index(WEIGHT_GRAD)] if WEIGHT_GRAD in ops else ops).count(INPUT_GRAD))
    return forwards, backwards


def _positions(program: Sequence[Instruction], ops: frozenset[str], counts: tuple[int, int]) -> tuple[int, int]:
    """Right behind the instruction that is, or completes, that many operations of ``ops``, for each of ``counts``."""
    ops |= {PAIR}  # which has one of each
    found = [k for k, at in enumerate(program, 1) if at.op in ops]
    return found[counts[0] - 1], found[counts[1] - 1]
