"""Places the copies of a rank's activations to host memory, and back (PipeOffload, arXiv 2503.01328).

The first chunks of every rank are offloaded. For each microbatch their forwards come first and their backwards last,
so their activations live longest, and half of the chunks hold three quarters of the memory (section 3.3 there).

Copies are placed on the logical clock (``clock.py``). One engine for each direction makes one copy at a time, each of
``offload_slots`` slots. A copy to the host is posted right behind its forward. At the first boundary by which the copy
is over, the rank waits for it and frees the memory. A copy back is posted at the last boundary from which it is over in
time; the wait is right before the backward. A forward is not offloaded if its copy back would start before the copy to
the host has finished.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pp.errors import ConfigError, PlanError
from megatron_pp.features.offload.offload_instructions import FREE_OFFLOAD, LOAD, OFFLOAD, WAIT_LOAD
from megatron_pp.plan.builder import settings_of
from megatron_pp.plan.hooks import PlanHooks
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec, check_whole
from megatron_pp.plan.lower.lowering import RankLowering

Copies = dict[int, list[Instruction]]  # boundary -> the copies to post or to wait for there


def copies_of(order: Sequence[Instruction], ends: Sequence[int], chunks: int, slots: int) -> tuple[Copies, Copies]:
    """(at, waits): the copies at each boundary of a rank's ``order``, and those right before the entry behind it, if
    the first ``chunks`` are offloaded. ``ends``: the slot in which each entry ends."""
    forwards = {_cell(at): i for i, at in enumerate(order) if at.op == FORWARD and at.chunk < chunks}
    backwards = [(i, at) for i, at in enumerate(order) if at.op in BACKWARD_OPS and at.chunk < chunks]
    starts = [end - 1 for end in ends]
    # Cell -> boundary
    freed = {}
    loaded = {}
    engine = 0
    for cell, i in forwards.items():
        engine = max(engine, ends[i]) + slots
        freed[cell] = bisect_left(starts, engine)
    engine = starts[-1] + 1
    for i, at in reversed(backwards):
        begin = min(engine, starts[i]) - slots
        loaded[_cell(at)] = boundary = bisect_right(ends, begin)
        if freed[_cell(at)] < boundary:
            engine = begin
    at_boundary: Copies = defaultdict(list)
    waits: Copies = defaultdict(list)
    kept = [(i, at) for i, at in backwards if freed[_cell(at)] < loaded[_cell(at)]]
    for op, boundary_of in ((OFFLOAD, {cell: i + 1 for cell, i in forwards.items()}), (FREE_OFFLOAD, freed)):
        for _, at in sorted(kept, key=lambda one: forwards[_cell(one[1])]):
            at_boundary[boundary_of[_cell(at)]].append(_copy(op, at))
    for i, at in kept:
        at_boundary[loaded[_cell(at)]].append(_copy(LOAD, at))
        waits[i].append(_copy(WAIT_LOAD, at))
    return at_boundary, waits


class _Hooks(PlanHooks):
    host_words = "offloaded"

    def checked(self, spec: PlanSpec) -> Mapping[str, Any]:
        chunks = 0 if spec.offload_chunks is None else spec.offload_chunks
        check_whole("number of offloaded chunks", chunks, 0)
        check_whole("offload_slots", spec.offload_slots, 1)
        if chunks > spec.num_chunks:
            raise PlanError(f"{chunks} chunks of every rank are to be offloaded; it has {spec.num_chunks}")
        return {}

    def of_config(self, config: Any, placement: Placement, training: bool) -> Mapping[str, Any]:
        chunks = config.offload_chunks
        if chunks is not None and chunks > placement.num_chunks:
            raise ConfigError(
                f"offload_chunks is {chunks}, more than the {placement.num_chunks} model chunk(s) of a rank"
            )
        return {"offload_chunks": chunks if training else None, "offload_slots": config.offload_slots}

    def check_lowered(self, spec: PlanSpec, settings: Mapping[str, Any]) -> None:
        if settings.get("offload_chunks") and spec.joins:
            raise PlanError("pairs (overlap_pairs) cannot be offloaded: it is not known which half saves what")

    def lay_out(self, rank: RankLowering) -> None:
        chunks = rank.settings.get("offload_chunks")
        if chunks and not rank.spec.forward_only:
            at_boundary, waits = copies_of(rank.order, rank.ends, chunks, rank.spec.offload_slots)
            rank.copies.update(at_boundary)
            rank.before_entry.update(waits)


HOOKS = _Hooks()


def offloaded_chunks(spec: PlanSpec) -> int:
    """The number of chunks of every rank that are offloaded, by the spec or else by its schedule."""
    return settings_of(spec).get("offload_chunks") or 0


def _cell(at: Instruction) -> tuple[int, int, int]:
    return at.chunk, at.mb, at.part


def _copy(op: str, at: Instruction) -> Instruction:
    return ins.placed(op, at.stage, at.mb, ins.NONE, at.chunk, at.part)
