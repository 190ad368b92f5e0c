"""Timelines as compact columns, for the HTML page. Times are whole ticks, 2^31 per timeline."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_pp.draw.merged import thinned
from megatron_pp.draw.palette import block_colour, ink_on
from megatron_pp.draw.timeline import Lane, Timeline
from megatron_pp.errors import PlanError
from megatron_pp.plan.instruction import (
    BACKWARD,
    FORWARD,
    FREE_B,
    FREE_F,
    FREE_OFFLOAD,
    INPUT_GRAD,
    LOAD,
    OFFLOAD,
    OUTPUT_S,
    OUTPUT_T,
    WAIT_ALL_REDUCE,
    WAIT_B,
    WAIT_BROADCAST,
    WAIT_F,
    WAIT_LOAD,
    WAIT_REDUCE,
    WEIGHT_GRAD,
)
from megatron_pp.plan.sim.simulation import Event, Transfer

_TICKS = 2**31
_COMPUTE = {FORWARD: 0, BACKWARD: 1, INPUT_GRAD: 2, WEIGHT_GRAD: 3, OUTPUT_S: 4, OUTPUT_T: 5}
_WAITS = {WAIT_F: 0, WAIT_B: 1, FREE_F: 2, FREE_B: 3, WAIT_BROADCAST: 4, WAIT_ALL_REDUCE: 5, WAIT_REDUCE: 6}
_COPY_WAITS = {FREE_OFFLOAD: 0, WAIT_LOAD: 1}
_MOST_CHUNKS, _MOST_MICROBATCHES = 2**9, 2**20
_Scale = tuple[float, int]  # length of a tick, and slices of a sequence
_MOST_MEMORY_STEPS = 4000, 48_000  # per lane, and of all lanes; more are thinned, peaks kept


class ColumnStore:
    """Columns one after another in one buffer; each is named by [offset in bytes, length]."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, typecode: str, values: Iterable[Any]) -> list[int]:
        """Append a column of 32-bit values: ``I`` whole numbers, ``f`` floats (little-endian)."""
        column = array(typecode, values)
        offset = len(self.data)
        self.data += column.tobytes()
        return [offset, len(column)]


def timeline_columns(timeline: Timeline, store: ColumnStore) -> dict[str, Any]:
    """The page's description of ``timeline``; adds its columns to ``store``.

    Raises PlanError beyond 512 chunks or a million microbatches.
    """
    if timeline.num_chunks > _MOST_CHUNKS or timeline.num_microbatches * timeline.slices > _MOST_MICROBATCHES:
        raise PlanError(
            f"the page shows at most {_MOST_CHUNKS} chunks and {_MOST_MICROBATCHES} microbatches, or slices of them"
        )
    end = timeline.end or 1.0
    tick = end / _TICKS
    sent = timeline.sent()
    most, of_all = _MOST_MEMORY_STEPS
    steps = min(most, of_all // len(timeline.lanes))
    each = zip(timeline.lanes, sent, timeline.stages, strict=True)
    scale = tick, timeline.slices
    lanes = [{**_lane(lane, parts, scale, steps, store), "stages": list(stages)} for lane, parts, stages in each]
    shades = [[block_colour(op, c, timeline.num_chunks) for c in range(timeline.num_chunks)] for op in _COMPUTE]
    return {
        "title": timeline.title,
        "unit": timeline.unit,
        "end": end,
        "tick": tick,
        "chunks": timeline.num_chunks,
        "microbatches": timeline.num_microbatches,
        "slices": timeline.slices,
        "ops": [_COMPUTE[op] for op in timeline.ops],
        "shortBlock": timeline.short_block,
        "lanes": lanes,
        "hasTransfers": timeline.has_transfers,
        "hasCopies": timeline.has_copies,
        "inBytes": timeline.memory_in_bytes,
        "shades": [[c.hex for c in row] for row in shades],
        "inks": [[ink_on(c).hex for c in row] for row in shades],
    }


def _lane(
    lane: Lane, sent: tuple[list[Transfer], list[Transfer]], scale: _Scale, steps: int, store: ColumnStore
) -> dict[str, Any]:
    memory = thinned(lane.memory, steps)
    return {
        "name": lane.name,
        "compute": _events(lane.compute, _COMPUTE, scale, store),
        "waits": _events([e for e in lane.waits if e.instruction.op in _WAITS], _WAITS, scale, store),
        "copyWaits": _events([e for e in lane.waits if e.instruction.op in _COPY_WAITS], _COPY_WAITS, scale, store),
        "offloads": _events(lane.copied(OFFLOAD), {OFFLOAD: 0}, scale, store),
        "loads": _events(lane.copied(LOAD), {LOAD: 1}, scale, store),
        "activations": _transfers(sent[0], scale, store),
        "gradients": _transfers(sent[1], scale, store),
        "memory": {
            "times": store.add("I", (_ticks(t, scale[0]) for t, _ in memory)),
            "values": store.add("f", (v for _, v in memory)),
            "peak": lane.peak,
        },
    }


def _events(events: Sequence[Event], ops: dict[str, int], scale: _Scale, store: ColumnStore) -> dict[str, list[int]]:
    tick, slices = scale
    instructions = (e.instruction for e in events)
    codes = [ops[at.op] << 29 | at.chunk << 20 | _part(at.mb, at.slice, slices) for at in instructions]
    return _spans(events, codes, tick, store)


def _part(mb: int, part: int, slices: int) -> int:
    """The number of a slice, counted through all microbatches; of a microbatch where sequences are whole."""
    return mb * slices + max(part, 0)


def _transfers(transfers: Sequence[Transfer], scale: _Scale, store: ColumnStore) -> dict[str, list[int]]:
    tick, slices = scale
    spans = _spans(transfers, [_part(t.mb, t.slice, slices) for t in transfers], tick, store)
    return {**spans, "where": store.add("I", (t.target << 20 | t.stage for t in transfers))}


def _spans(
    spans: Sequence[Event] | Sequence[Transfer], codes: list[int], tick: float, store: ColumnStore
) -> dict[str, list[int]]:
    return {
        "starts": store.add("I", (_ticks(s.start, tick) for s in spans)),
        "lengths": store.add("I", (_ticks(s.end - s.start, tick) for s in spans)),
        "codes": store.add("I", codes),
    }


def _ticks(time: float, tick: float) -> int:
    return min(2**32 - 1, max(0, round(time / tick)))
