"""Where the steady state of a schedule stands: how many microbatches show it, and which block of a plan it repeats."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import compress, count
from operator import eq, itemgetter, ne, sub

from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, INPUT_GRAD, PAIR, WEIGHT_GRAD, Instruction, later
from megatron_pp.plan.ir.repeated import Block
from megatron_pp.plan.ir.spec import PlanSpec

_MARGIN = 4  # operations of a rank between its steady state and the block, on either side
_Line = Sequence[Instruction]
_OP = itemgetter(Instruction._fields.index("op"))


def fewest_microbatches(orders: Iterable[_Line], forwards: int, period: int) -> int:
    """How many a plan has at least whose ``orders``, on ranks that run ``forwards`` of each microbatch, one of a chunk
    and slice, stay in their steady state for ``period`` microbatches.
    """
    return -(-(sum(_edges(orders)) + 2 * _MARGIN) // forwards) + period


def steady_place(spec: PlanSpec, period: int, runs: Sequence[_Line], longer: Sequence[_Line]) -> int | None:
    """How many backwards (forwards where the plan has no others) each rank has behind it at the start of a block of
    ``period`` microbatches with which once more ``runs``, what the ranks run, are ``longer``, wherever those are
    placed: in the middle of all such places. None where there is none with a margin.
    """
    first, last = 1, _operations(spec, spec.num_microbatches)
    for run, wanted in zip(runs, longer, strict=True):
        ends, moved = _ends(run, spec), (later(at, period) for at in reversed(run))
        first = max(first, bisect_left(ends, len(run) - _alike(moved, reversed(wanted), len(run))) + 1)
        last = min(last, bisect_right(ends, _alike(run, wanted, len(run))) - _operations(spec, period))
    # A shorter last group delays operations far ahead of it: found by trials, for all sizes that were tried.
    margin = 3 * spec.pipeline_size if spec.num_microbatches % period else _MARGIN
    if last - first < margin:
        return None
    place = (first + last) // 2
    lengths = map(sub, *block_at(place, spec, period, runs)[1::-1])
    longer_by = (len(wanted) - len(run) for run, wanted in zip(runs, longer, strict=True))
    return place if all(map(eq, lengths, longer_by)) else None


def _alike(ran: Iterable[Instruction], goal: Iterable[Instruction], length: int) -> int:
    """How many of ``ran``, of that length, are the same as in ``goal``, which is longer, before one differs."""
    return next(compress(count(), map(ne, ran, goal)), length)


def block_at(place: int, spec: PlanSpec, period: int, lines: Iterable[_Line]) -> Block:
    """``period`` microbatches from that place on: a block that ``verify`` may find to be repeatable; of programs, or of
    orders in which the ranks run the same compute.
    """
    found, behind = [_ends(line, spec) for line in lines], place + _operations(spec, period)
    return Block(tuple(ends[place - 1] for ends in found), tuple(ends[behind - 1] for ends in found), period)


def _operations(spec: PlanSpec, microbatches: int) -> int:
    """Backwards, or forwards, of a rank."""
    return microbatches * spec.num_chunks * spec.slices


def _ends(line: _Line, spec: PlanSpec) -> list[int]:
    """Right behind each of them, or the pair that it is in."""
    ops = {FORWARD} if spec.forward_only else {*BACKWARD_OPS, PAIR}
    return [k for k, op in enumerate(map(_OP, line), 1) if op in ops]


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
