"""A timeline in Chrome's trace event format, which https://ui.perfetto.dev and chrome://tracing open.

Each rank is a process. It has a thread for compute, one for waits, and four for transfers sent and received; arrows
join both ends of a transfer. If the step has copies to host memory, there are two more threads for copies to the host
and back; if it has collectives of replicas, two more for them. Memory is a counter, in bytes or microbatches. Each
event has the name of its instruction in the plan: a transfer is ``SEND_F0.3`` at the sender and ``RECV_F0.3`` at the
receiver. Several steps of one run follow each other; one more thread has their names.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from megatron_pp.plan.ir.instruction import BACKWARD, NONE, placed
from megatron_pp.plan.simulate.simulation import Transfer
from megatron_pp.tools.draw.palette import NAMES
from megatron_pp.tools.draw.timeline import COLLECTIVES, COPIES, Lane, Timeline

_COMPUTE, _WAITS, _SENT_ACT, _SENT_GRAD, _GOT_ACT, _GOT_GRAD = range(6)
_STEPS = 6
_STRIPS = {  # thread: (its name, the operations it shows, the pair of kinds that it belongs to)
    7: ("copies to host memory", COPIES[0], COPIES),
    8: ("copies back", COPIES[1], COPIES),
    9: ("unshards", COLLECTIVES[0], COLLECTIVES),
    10: ("gradient reductions", COLLECTIVES[1], COLLECTIVES),
}
_THREADS = "compute", "waits", "activations sent", "gradients sent", "activations received", "gradients received"
_MICROS = 1e3  # microseconds in a millisecond; a slot is shown as one millisecond


def render_chrome_trace(timeline: Timeline) -> str:
    """JSON of the trace."""
    return _document(timeline.title, chain(_names(timeline), _events(timeline, 0.0, "")))


def render_chrome_steps(title: str, steps: Sequence[tuple[str, float, Timeline]]) -> str:
    """JSON of several steps of the same ranks. A step is (name, start time in the timeline's unit, timeline)."""
    events = chain.from_iterable(_step(name, began, timeline) for name, began, timeline in steps)
    return _document(title, chain(_names(steps[0][2]), events))


def _document(title: str, events: Iterator[dict[str, Any]]) -> str:
    parts = (json.dumps(event, separators=(",", ":")) for event in events)
    meta = json.dumps({"title": title})
    return '{"displayTimeUnit":"ms","otherData":' + meta + ',"traceEvents":[\n' + ",\n".join(parts) + "\n]}\n"


def _step(name: str, began: float, timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(len(timeline.lanes)):
        yield from _thread(rank, _STEPS, "steps", -1)
        span = {"ph": "X", "pid": rank, "tid": _STEPS, "name": name}
        yield {**span, "ts": began * _MICROS, "dur": timeline.end * _MICROS}
    yield from _events(timeline, began, f"{name}: ")


def _events(timeline: Timeline, began: float, prefix: str) -> Iterator[dict[str, Any]]:
    """The events of one step; ``prefix`` makes the ids of its arrows unique."""
    unit = "bytes" if timeline.memory_in_bytes else "microbatches"
    for rank, lane in enumerate(timeline.lanes):
        yield from _spans(rank, lane, began)
        for time, value in lane.memory:
            yield {"ph": "C", "pid": rank, "name": "memory", "ts": (began + time) * _MICROS, "args": {unit: value}}
    chunks = [{event.instruction.stage: event.instruction.chunk for event in lane.compute} for lane in timeline.lanes]
    for number, transfer in enumerate(timeline.transfers):
        if transfer.end <= transfer.start:
            continue
        gradient = transfer.kind == BACKWARD
        args = {
            "from": transfer.source,
            "to": transfer.target,
            "bytes": transfer.size,
            "microbatch": transfer.mb,
            "for stage": transfer.stage,
        }
        start = (began + transfer.start) * _MICROS
        end = (began + transfer.end) * _MICROS
        span = {"ph": "X", "ts": start, "dur": end - start, "args": args}
        sent = _SENT_ACT + gradient
        got = _GOT_ACT + gradient
        made = transfer.stage + 1 if gradient else transfer.stage - 1
        yield {
            **span,
            "name": _post("SEND", transfer, chunks[transfer.source].get(made)),
            "pid": transfer.source,
            "tid": sent,
        }
        yield {
            **span,
            "name": _post("RECV", transfer, chunks[transfer.target].get(transfer.stage)),
            "pid": transfer.target,
            "tid": got,
        }
        flow = {"cat": "transfer", "name": "transfer", "id": f"{prefix}{number}" if prefix else number}
        yield {**flow, "ph": "s", "pid": transfer.source, "tid": sent, "ts": start}
        yield {**flow, "ph": "f", "bp": "e", "pid": transfer.target, "tid": got, "ts": end}


def _post(what: str, transfer: Transfer, chunk: int | None) -> str:
    """The post's name in the plan. ``chunk`` is None if a named tensor comes from a stage that is not a neighbour."""
    op = f"{what}_{transfer.kind}"
    return op if chunk is None else str(placed(op, transfer.stage, transfer.mb, NONE, chunk, transfer.part))


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, lane in enumerate(timeline.lanes):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": lane.name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        found = [(thread, name) for thread, (name, _, pair) in _STRIPS.items() if timeline.has_copies(*pair)]
        for thread, name in (*enumerate(_THREADS), *found):
            yield from _thread(rank, thread, name, thread)


def _thread(rank: int, thread: int, name: str, position: int) -> Iterator[dict[str, Any]]:
    meta = {"ph": "M", "pid": rank, "tid": thread}
    yield {**meta, "name": "thread_name", "args": {"name": name}}
    yield {**meta, "name": "thread_sort_index", "args": {"sort_index": position}}


def _spans(rank: int, lane: Lane, began: float) -> Iterator[dict[str, Any]]:
    strips = [(thread, name, lane.copied(ops)) for thread, (name, ops, _) in _STRIPS.items()]
    for thread, name, events in ((_COMPUTE, "", lane.compute), (_WAITS, "wait", lane.waits), *strips):
        for event in events:
            at = event.instruction
            kind = NAMES.get(at.op, name)
            span = {"ph": "X", "pid": rank, "tid": thread, "name": str(at), "cat": kind}
            start = (began + event.start) * _MICROS
            length = (event.end - event.start) * _MICROS
            args = {"chunk": at.chunk, "microbatch": at.mb, "stage": at.stage}
            if at.part >= 0:
                args["slice"] = at.part
            yield {**span, "ts": start, "dur": length, "args": args}
