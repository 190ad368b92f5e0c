"""The steady state of a schedule: how many microbatches show it, and which block of a plan it repeats."""

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

_MARGIN = 4  # operations of a rank between its steady state and the block, on either side
_Line = Sequence[Instruction]


def fewest_microbatches(orders: Iterable[_Line], forwards: int, period: int) -> int:
    """Smallest M whose orders show ``period`` microbatches of steady state. ``forwards``: of each microbatch on a rank,
    one for each chunk and part.
    """
    return -(-(sum(_edges(orders)) + 2 * _MARGIN) // forwards) + period


def steady_place(spec: PlanSpec, period: int, runs: Sequence[_Line], longer: Sequence[_Line]) -> int | None:
    """Where to cut a repeatable block of ``period`` microbatches, counted in backwards (forwards where the plan has no
    others); the middle candidate. None where candidates are too few for a margin.

    ``runs``: what the ranks run; ``longer``: the same for ``period`` microbatches more. A block is repeatable where
    ``runs`` with the block twice are ``longer``.
    """
    first, last = 1, _operations(spec, spec.num_microbatches)
    for run, wanted in zip(runs, longer, strict=True):
        ends = _ends(run, spec)
        moved = (later(at, period) for at in reversed(run))
        same_behind = _same(moved, reversed(wanted), len(run))
        same_before = _same(run, wanted, len(run))
        first = max(first, bisect_left(ends, len(run) - same_behind) + 1)
        last = min(last, bisect_right(ends, same_before) - _operations(spec, period))
    # A shorter last group delays operations far ahead of it: found by trials, for all sizes that were tried.
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
    """How many operations of ``run``, of that length, are those of ``wanted``, which is longer, before one differs."""
    for same, (one, other) in enumerate(zip(run, wanted, strict=False)):
        if one != other:
            return same
    return length


def block_at(place: int, spec: PlanSpec, period: int, lines: Iterable[_Line]) -> Block:
    """The block of ``period`` microbatches from ``place`` on, in programs, or in orders in which the ranks run the same
    compute. ``verify`` finds whether it may be repeated.
    """
    behind = place + _operations(spec, period)
    ends = [_ends(line, spec) for line in lines]
    return Block(tuple(one[place - 1] for one in ends), tuple(one[behind - 1] for one in ends), period)


def _operations(spec: PlanSpec, microbatches: int) -> int:
    """Backwards, or forwards, of a rank."""
    return microbatches * spec.num_chunks * spec.num_parts


def _ends(line: _Line, spec: PlanSpec) -> list[int]:
    """The positions right behind each of them, or behind what it is joined in."""
    ops = {FORWARD} if spec.forward_only else BACKWARD_OPS | JOINED_OPS
    return [k for k, at in enumerate(line, 1) if at.op in ops]


def _edges(orders: Iterable[_Line]) -> tuple[int, int]:
    """The most that a rank runs before its steady state: forwards before its first backward, and input gradients before
    its first weight gradient.
    """
    forwards = backwards = 0
    for order in orders:
        ops = [at.op for at in order]
        forwards = max(forwards, next((k for k, op in enumerate(ops) if op != FORWARD), len(ops)))
        backwards = max(backwards, (ops[: ops.index(WEIGHT_GRAD)] if WEIGHT_GRAD in ops else ops).count(INPUT_GRAD))
    return forwards, backwards
