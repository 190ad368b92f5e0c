"""Places the collectives of an output layer that is split over all ranks: when each is due, and which operation of a
rank waits for it. ``output_instructions.py`` says what each is for.

All ranks post them on one communicator, in the order of their rounds (``clock.py``). Those of one round are posted in
the reverse of the order in which they are listed here. None is over before all ranks have posted it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_pp.features.output_layer.output_instructions import (
    ALL_REDUCE,
    BROADCAST,
    OUTPUT_S,
    OUTPUT_T,
    REDUCE,
    collected_inputs,
    facts_at_end,
    needs_at_root,
    output_root,
    output_stages,
)
from megatron_pp.plan.hooks import FeatureBytes, PlanHooks
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import Result
from megatron_pp.plan.ir.instruction import NONE, Instruction, each, numbered, placed
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.lower.lowering import RankLowering

_ORDER = (REDUCE, ALL_REDUCE, BROADCAST)
MADE_BY = {BROADCAST: ins.FORWARD, ALL_REDUCE: OUTPUT_S, REDUCE: OUTPUT_T}
"""Collective -> the operation that makes the tensor which it moves."""


class Collective(NamedTuple):
    """One rank's end of a collective.

    round     the logical slot at whose end it is due
    post, wait  the instructions
    ready     the first boundary of the rank's order at which it may be posted
    use       the entry that waits for it; None: the wait is one entry behind its post
    receives  whether the rank takes part with an empty buffer"""

    round: int
    post: Instruction
    wait: Instruction
    ready: int
    use: int | None
    receives: bool


def collectives_of(
    rank: int,
    order: Sequence[Instruction],
    ends: dict[Result, dict[tuple[int, int], int]],
    placement: Placement,
    forward_only: bool,
) -> list[Collective]:
    """The collectives of ``rank``, which runs ``order``, in the order in which all ranks post them. ``ends``: when
    results exist."""
    found = sorted(_each(order, ends, placement, forward_only), key=lambda each: each[0])
    at = {(one.op, one.mb): i for i, one in numbered(order)}
    is_root = rank == output_root(placement)
    backward = (ins.BACKWARD, ins.INPUT_GRAD) if is_root else ()
    users = {  # the root has the broadcast's tensor itself; by the time of T all have theirs
        BROADCAST: (OUTPUT_T if is_root else OUTPUT_S,),
        ALL_REDUCE: (OUTPUT_T, *backward),
        REDUCE: backward,
    }
    made = []
    for (due, _, mb), op in found:
        ready = at[(MADE_BY[op], mb)] + 1
        use = min((at[(user, mb)] for user in users[op] if (user, mb) in at), default=None)
        stage = placement.stages[rank][0]
        ends_of = placed(op, stage, mb, NONE, 0), placed(ins.FINISHED_BY[op], stage, mb, NONE, 0)
        made.append(Collective(due, *ends_of, ready, use, op == BROADCAST and not is_root))
    return made


def _each(
    order: Sequence[Instruction],
    ends: dict[Result, dict[tuple[int, int], int]],
    placement: Placement,
    forward_only: bool,
) -> Iterator[tuple[tuple[int, int, int], str]]:
    """((round, place in _ORDER, microbatch), op) of every collective; ``order``: that of any rank."""
    trains_with_two = placement.barriers == 2 and not forward_only
    for mb in (one.mb for one in each(order) if one.op == OUTPUT_S):
        for place, op in enumerate(_ORDER if trains_with_two else _ORDER[1:]):
            stages = output_stages(placement) if op != BROADCAST else output_stages(placement)[-1:]
            yield (max(ends[(MADE_BY[op], stage)][(mb, NONE)] for stage in stages), place, mb), op


def placed_collectives(
    collectives: Sequence[Collective], ends: Sequence[int], early: Callable[[int], int], ahead: bool
) -> Iterator[tuple[int, Collective]]:
    """(boundary at which it is posted, collective) of one rank, whose entries end at ``ends``. ``early(use)``: the
    boundary at which a receive for the entry ``use`` is early enough.

    A collective is posted as soon as the rank's own part exists and the collective before it is due: behind an
    unfinished one it would block compute with one hardware queue. Without ``ahead``, that is if later instructions may
    wait for all that is posted, none is posted before it is due."""
    earliest = 0
    boundaries = []
    dues = [bisect_right(ends, one.round) for one in collectives]
    for one, due in zip(collectives, dues, strict=True):
        earliest = max(earliest, one.ready if ahead else due)
        boundaries.append(earliest)
        earliest = max(earliest, due)
    latest = len(ends)
    for k in reversed(range(len(collectives))):
        one = collectives[k]
        if one.receives and one.use is not None:  # not long ahead of its use
            boundaries[k] = max(boundaries[k], min(early(one.use), dues[k], latest))
        latest = boundaries[k]
    return zip(boundaries, collectives, strict=True)


class _Hooks(PlanHooks):
    order_words = ", and S and T of a split output layer"
    pass_words = "S and T are passes of chunk 0, in a schedule that splits the output layer"
    barrier_words = "a split output layer has 1 or 2 barriers and one chunk a rank, a whole one 0 barriers"
    gradient_words = "the output layer's gradient"
    ring_words = "split output layer"

    def inputs(self, op: str, stage: int, placement: Placement) -> tuple[Result, ...]:
        return collected_inputs(op, stage, placement)

    def needs_at_root(self, op: str, needs: int, barriers: int) -> int:
        return needs_at_root(op, needs, barriers)

    def facts_at_end(self, placement: Placement, forward_only: bool) -> int:
        return facts_at_end(placement, forward_only)

    def lay_out(self, rank: RankLowering) -> None:
        clocked = rank.clocked if rank.turns is None else rank.turns.clocked
        forward_only = rank.spec.forward_only
        ahead = not rank.spec.may_wait
        found = collectives_of(rank.rank, rank.order, clocked.result_ends, rank.placement, forward_only)
        for boundary, one in placed_collectives(found, clocked.ends[rank.rank], rank.ahead, ahead):
            rank.place_collective(boundary, one.round, one.post, one.wait, one.use)

    def bytes_of(self, plan: Plan, rank: int, shape: Any) -> FeatureBytes:
        """A rank has its rows of the layer, and the softmax of these between S and T."""
        share = 1 / plan.placement.pipeline_size
        placement = plan.placement
        static = shape.static_bytes(placement.stages[rank], placement.num_stages, share)
        return FeatureBytes(static, replace(shape, vocab_size=0), each={"logits": shape.logits_bytes * share})


HOOKS = _Hooks()
