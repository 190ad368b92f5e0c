"""Finds the steady state of a schedule: how many microbatches have one, and which block of a plan can be repeated."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from megatron_pp.plan.ir.instruction import (
    BACKWARD_OPS,
    FORWARD,
    INPUT_GRAD,
    JOINED_OPS,
    WEIGHT_GRAD,
    Instruction,
    later,
)
from megatron_pp.plan.ir.repeated import Block
from megatron_pp.plan.ir.spec import PlanSpec

_MARGIN = 4  # operations of a rank between the ends of its steady state and the block, on each side
_Line = Sequence[Instruction]


def fewest_microbatches(orders: Iterable[_Line], forwards: int, period: int) -> int:
    """The smallest M whose orders have ``period`` microbatches of steady state. ``forwards``: the number of forwards of
    a microbatch on a rank, one for each chunk and part.
    """
    return -(-(sum(_edges(orders)) + 2 * _MARGIN) // forwards) + period


def steady_place(spec: PlanSpec, period: int, runs: Sequence[_Line], longer: Sequence[_Line]) -> int | None:
    """The place of a repeatable block of ``period`` microbatches, counted in backwards, or in forwards if the plan has
    no backwards. Of all candidates it is the middle one. None if there are too few candidates for a margin.

    ``runs``: the operations of each rank; ``longer``: the same for ``period`` microbatches more. A block is repeatable
    if ``runs`` with the block twice equals ``longer``.
    """
    first, last = 1, _operations(spec, spec.num_microbatches)
    for run, wanted in zip(runs, longer, strict=True):
        ends = _ends(run, spec)
        moved = (later(at, period) for at in reversed(run))
        same_behind = _same(moved, reversed(wanted), len(run))
        same_before = _same(run, wanted, len(run))
        first = max(first, bisect_left(ends, len(run) - same_behind) + 1)
        last = min(last, bisect_right(ends, same_before) - _operations(spec, period))
    # A shorter last group delays operations far before it. By how much was found by trials of all sizes below.
    margin = 3 * spec.pipeline_size if spec.num_microbatches % period else _MARGIN
    if last - first < margin:
        return None
    place = (first + last) // 2
    block = block_at(place, spec, period, runs)
    for run, wanted, start, end in zip(runs, longer, block.starts, block.ends, strict=True):
        if len(wanted) - len(run) != end - start:
            return None
    return place


def _same(run: Iterable[Instruction], wanted: Iterable[Instruction], length: int) -> int:
    """The number of operations of ``run``, at most ``length``, that equal those of ``wanted`` before one differs."""
    for same, (one, other) in enumerate(zip(run, wanted, strict=False)):
        if one != other:
            return same
    return length


def block_at(place: int, spec: PlanSpec, period: int, lines: Iterable[_Line]) -> Block:
    """The block of ``period`` microbatches that begins at ``place``, in programs or in orders with the same compute.
    ``verify`` decides whether it may be repeated.
    """
    behind = place + _operations(spec, period)
    ends = [_ends(line, spec) for line in lines]
    return Block(tuple(one[place - 1] for one in ends), tuple(one[behind - 1] for one in ends), period)


def _operations(spec: PlanSpec, microbatches: int) -> int:
    """The number of backwards of a rank, or of forwards in a plan without backwards."""
    return microbatches * spec.num_chunks * spec.num_parts


def _ends(line: _Line, spec: PlanSpec) -> list[int]:
    """The positions right behind each of these operations, or behind the group of which it is a member."""
    ops = {FORWARD} if spec.forward_only else BACKWARD_OPS | JOINED_OPS
    return [k for k, at in enumerate(line, 1) if at.op in ops]


def _edges(orders: Iterable[_Line]) -> tuple[int, int]:
    """The largest numbers of operations of a rank before its steady state: forwards before the first backward, and
    input gradients before the first weight gradient.
    """
    forwards = backwards = 0
    for order in orders:
        ops = [at.op for at in order]
        forwards = max(forwards, next((k for k, op in enumerate(ops) if op != FORWARD), len(ops)))
        backwards = max(backwards, (ops[: ops.index(WEIGHT_GRAD)] if WEIGHT_GRAD in ops else ops).count(INPUT_GRAD))
    return forwards, backwards
