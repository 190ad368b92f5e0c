"""A timeline in Chrome's trace event format, which https://ui.perfetto.dev and chrome://tracing open.

One process per rank, with a thread for compute, one for waits, and four for transfers sent and received, with arrows
between them; memory is a counter. Times are microseconds: one ``unit`` of the timeline is ``scale`` of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_pp.draw.palette import NAMES
from megatron_pp.draw.timeline import Lane, Timeline

_COMPUTE, _WAITS, _SENT_ACT, _SENT_GRAD, _GOT_ACT, _GOT_GRAD = range(6)
_THREADS = (
    "compute",
    "waits",
    "activations sent",
    "gradients sent",
    "activations received",
    "gradients received",
)
MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "slots": 1e3}


def render_chrome_trace(timeline: Timeline) -> str:
    """JSON of the trace. A unit without a length (slots) is shown as a millisecond."""
    scale = MICROSECONDS.get(timeline.unit, 1e3)
    parts = (json.dumps(event, separators=(",", ":")) for event in _events(timeline, scale))
    meta = json.dumps({"title": timeline.title})
    return '{"displayTimeUnit":"ms","otherData":' + meta + ',"traceEvents":[\n' + ",\n".join(parts) + "\n]}\n"


def _events(timeline: Timeline, scale: float) -> Iterator[dict[str, Any]]:
    for rank, lane in enumerate(timeline.lanes):
        yield from _names(rank, lane)
        yield from _spans(timeline, rank, lane, scale)
        for time, value in lane.memory:
            yield {"ph": "C", "pid": rank, "name": "memory", "ts": time * scale, "args": {"bytes": value}}
    for number, t in enumerate(timeline.transfers):
        if t.end <= t.start:
            continue
        gradient = t.kind == "G"
        name = f"{'gradient' if gradient else 'activation'} of microbatch {t.mb} for stage {t.stage}"
        args = {"from": t.source, "to": t.target, "bytes": t.size}
        span = {"ph": "X", "name": name, "ts": t.start * scale, "dur": (t.end - t.start) * scale, "args": args}
        sent, got = _SENT_ACT + gradient, _GOT_ACT + gradient
        yield {**span, "pid": t.source, "tid": sent}
        yield {**span, "pid": t.target, "tid": got}
        flow = {"cat": "transfer", "name": "transfer", "id": number}
        yield {**flow, "ph": "s", "pid": t.source, "tid": sent, "ts": t.start * scale}
        yield {**flow, "ph": "f", "bp": "e", "pid": t.target, "tid": got, "ts": t.end * scale}


def _names(rank: int, lane: Lane) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": lane.name}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for thread, name in enumerate(_THREADS):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _spans(timeline: Timeline, rank: int, lane: Lane, scale: float) -> Iterator[dict[str, Any]]:
    for thread, events in ((_COMPUTE, lane.compute), (_WAITS, lane.waits)):
        for start, end, at in ((e.start, e.end, e.instruction) for e in events):
            args: dict[str, Any] = {"chunk": at.chunk, "microbatch": at.mb, "stage": timeline.stages[rank][at.chunk]}
            yield {
                "ph": "X",
                "pid": rank,
                "tid": thread,
                "name": str(at),
                "cat": NAMES.get(at.op, "wait"),
                "ts": start * scale,
                "dur": (end - start) * scale,
                "args": args,
            }
