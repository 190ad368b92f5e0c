"""Where the steady state of a schedule stands: how many microbatches show it, and which block of a plan it repeats."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import eq, itemgetter, sub

from megatron_pp.plan.instruction import BACKWARD_OPS, FORWARD, INPUT_GRAD, PAIR, WEIGHT_GRAD, Instruction
from megatron_pp.plan.repeated import Block
from megatron_pp.plan.spec import PlanSpec

_MARGIN = 4  # operations of a rank between its steady state and the block, on either side
_Line = Sequence[Instruction]
_OPERATION = itemgetter(*map(Instruction._fields.index, ("op", "mb", "chunk", "slice")))


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
        ran, goal, ends = list(map(_OPERATION, run)), list(map(_OPERATION, wanted)), _ends(run, spec)
        moved = [(op, mb + period, chunk, part) for op, mb, chunk, part in ran]
        first = max(first, bisect_left(ends, len(ran) - _alike(reversed(moved), reversed(goal))) + 1)
        last = min(last, bisect_right(ends, _alike(ran, goal)) - _operations(spec, period))
    # A shorter last group delays operations far ahead of it: found by trials, for all sizes that were tried.
    margin = 3 * spec.pipeline_size if spec.num_microbatches % period else _MARGIN
    if last - first < margin:
        return None
    place = (first + last) // 2
    lengths = map(sub, *block_at(place, spec, period, runs)[1::-1])
    longer_by = (len(wanted) - len(run) for run, wanted in zip(runs, longer, strict=True))
    return place if all(map(eq, lengths, longer_by)) else None


def _alike(ran: Iterable[object], goal: Iterable[object]) -> int:
    """How many of both are the same before one differs."""
    count = 0
    for one, other in zip(ran, goal, strict=False):
        if one != other:
            break
        count += 1
    return count


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
