"""Timelines as one HTML page without network access: zoom, hover, memory below each rank, light and dark; also tables,
and charts of a run's steps.

Blocks are drawn on a canvas from compressed columns: half a million of them take a few megabytes. Times are whole
ticks, 2^31 per timeline.
"""

import base64
import gzip
import json
from array import array
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from megatron_pp.draw import facts
from megatron_pp.draw.curves import Chart, render_charts
from megatron_pp.draw.facts import value_ticks
from megatron_pp.draw.palette import DARK, LIGHT, NAMES, OPERATIONS, block_colour, ink_on
from megatron_pp.draw.timeline import Lane, Timeline, thinned
from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import COPIES_FROM_HOST, COPIES_TO_HOST, COPY_OF, POST_OF
from megatron_pp.plan.simulate.simulation import Event, Transfer

_TICKS = 2**31
# The page's numbers of operations, waits and waits for copies.
_COMPUTE, _WAITS, _COPY_WAITS = ({op: k for k, op in enumerate(ops)} for ops in (OPERATIONS, POST_OF, COPY_OF))
_MOST_CHUNKS, _MOST_MICROBATCHES = 2**9, 2**20
_Scale = tuple[float, int]  # length of a tick, and slices of a sequence
_MOST_MEMORY_STEPS = 4000, 48_000  # per lane, and of all lanes; more are thinned, peaks kept
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # heading, column names, rows


def render_html(
    timelines: Sequence[Timeline], title: str, tables: Sequence[Table] = (), charts: Sequence[Chart] = ()
) -> str:
    """One page with ``timelines`` one below the other on a common time axis, ``charts`` before and ``tables`` of text
    after them. Without timelines, as of a run that recorded no step, the page has the others alone."""
    store = ColumnStore()
    most = max((t.most_memory for t in timelines), default=0.0)
    head = {
        "names": NAMES,
        "mostMemory": most,
        "memoryTicks": value_ticks(most, timelines[0].memory_in_bytes) if timelines else [],
        "timelines": [timeline_columns(t, store) for t in timelines],
    }
    page = files("megatron_pp.draw").joinpath("page")
    parts = {
        "TITLE": escape(title),
        "CURVES": render_charts(charts),
        "COSTS": escape(facts.costs_line(timelines)) if timelines else "",
        "EMPTY": "" if timelines else " hidden",
        "STYLE": _colours() + page.joinpath("timeline.css").read_text(encoding="utf-8"),
        "LEGEND": _legend(timelines) if timelines else "",
        "CHARTS": "\n".join(_chart(k, t) for k, t in enumerate(timelines)),
        "TABLES": "\n".join(_table(*table) for table in tables),
        "HEAD": json.dumps(head, separators=(",", ":")).replace("<", "\\u003c"),
        "COLUMNS": base64.b64encode(gzip.compress(bytes(store.data), compresslevel=6, mtime=0)).decode("ascii"),
        "SCRIPT": page.joinpath("timeline.js").read_text(encoding="utf-8"),
    }
    pieces = page.joinpath("timeline.html").read_text(encoding="utf-8").split("@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _legend(timelines: Sequence[Timeline]) -> str:
    keys = []
    for key in facts.legend_keys(timelines):
        colours = [colour.hex for colour in key.colours] or ([f"var(--{key.kind})"] if key.kind != facts.SHADES else [])
        if key.kind == facts.MEMORY:
            colours.append("var(--memory_last)")
        thin = "" if key.kind in (*OPERATIONS, facts.IDLE) else ' class="thin"'
        boxes = "".join(f'<i{thin} style="background:{colour}"></i>' for colour in colours)
        keys.append(f'<span class="key">{boxes} {escape(key.label)}</span>')
    return "\n".join(keys)


def _chart(number: int, timeline: Timeline) -> str:
    numbers = ", ".join(facts.summary(timeline))
    label = escape(f"{timeline.title}: {numbers}", quote=True)
    note = f'<p class="note">{escape(timeline.note)}</p>\n' if timeline.note else ""
    return (
        f'<h2>{escape(timeline.title)} <span class="soft">{escape(numbers)}</span></h2>\n{note}'
        f'<canvas id="chart{number}" role="img" aria-label="{label}"></canvas>'
    )


def _colours() -> str:
    """The two themes as CSS: the reader's by default, or the one chosen with the button."""
    light, dark = (
        "".join(f"--{name}: {colour.hex}; " for name, colour in theme._asdict().items()) for theme in (LIGHT, DARK)
    )
    return (
        f":root {{ color-scheme: light dark; {light}}}\n"
        f':root[data-theme="light"] {{ color-scheme: light; }}\n'
        f':root[data-theme="dark"] {{ color-scheme: dark; {dark}}}\n'
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark}}} }}\n'
    )


def _table(heading: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = f"<thead><tr>{head}</tr></thead>\n" if head else ""
    return f'<h2>{escape(heading)}</h2>\n<div class="wide"><table>{head}<tbody>\n{body}\n</tbody></table></div>'


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
    tick, (most, of_all) = end / _TICKS, _MOST_MEMORY_STEPS
    steps, scale = min(most, of_all // len(timeline.lanes)), (tick, timeline.slices)
    each = zip(timeline.lanes, timeline.sent(), timeline.stages, strict=True)
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
        "offloads": _events(lane.copied(COPIES_TO_HOST), dict.fromkeys(COPIES_TO_HOST, 0), scale, store),
        "loads": _events(lane.copied(COPIES_FROM_HOST), dict.fromkeys(COPIES_FROM_HOST, 1), scale, store),
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
