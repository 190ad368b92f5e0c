"""Timelines as one HTML page that needs no network: with zoom, hover texts, memory curves, light and dark colours, and
tables.

Blocks are drawn on a canvas from compressed columns: half a million blocks take a few megabytes. Times are whole ticks;
a timeline has 2^31 ticks.
"""

import base64
import gzip
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import COPY_OF, POST_OF, STAGE_OPS, Instruction
from megatron_pp.plan.simulate.simulation import Event, Transfer
from megatron_pp.tools.draw import facts
from megatron_pp.tools.draw.facts import value_ticks
from megatron_pp.tools.draw.palette import DARK, LIGHT, NAMES, OPERATIONS, block_colour, ink_on
from megatron_pp.tools.draw.timeline import COLLECTIVES, COPIES, Lane, Timeline, thinned

_TICKS = 2**31
_OF_SHARDS = [op for op in POST_OF if op in STAGE_OPS]
# The numbers by which the page names operations, waits, and waits for copies and for collectives of replicas. A code
# has three bits for the number, so there are at most 8 of each.
_COMPUTE, _WAITS, _COPY_WAITS = (
    {op: k for k, op in enumerate(ops)}
    for ops in (OPERATIONS, [op for op in POST_OF if op not in STAGE_OPS], [*COPY_OF, *_OF_SHARDS])
)
_STRIPS = dict(zip(("offloads", "loads", "gathers", "scatters"), (*COPIES, *COLLECTIVES), strict=True))
_MOST_CHUNKS = 2**9
_MOST_MICROBATCHES = 2**20
_MOST_MEMORY_STEPS = 4000, 48_000  # per lane, and in all lanes; more steps are thinned, but keep their peaks
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # heading, column names, rows


def render_html(timelines: Sequence[Timeline], title: str, tables: Sequence[Table] = (), charts: str = "") -> str:
    """The page: first ``charts`` (HTML), then ``timelines`` below each other on one time axis, then ``tables`` of text.

    A run that recorded no step has no timelines; its page has the charts and tables only.
    """
    data = bytearray()
    most = max((t.most_memory for t in timelines), default=0.0)
    head = {
        "names": NAMES,
        "mostMemory": most,
        "memoryTicks": value_ticks(most, timelines[0].memory_in_bytes) if timelines else [],
        "timelines": [_described(timeline, data) for timeline in timelines],
    }
    page = files("megatron_pp.tools.draw").joinpath("page")
    parts = {
        "TITLE": escape(title),
        "CURVES": charts,
        "COSTS": escape(facts.costs_line(timelines)) if timelines else "",
        "EMPTY": "" if timelines else " hidden",
        "STYLE": _colours() + page.joinpath("timeline.css").read_text(encoding="utf-8"),
        "LEGEND": _legend(timelines) if timelines else "",
        "CHARTS": "\n".join(_chart(k, t) for k, t in enumerate(timelines)),
        "TABLES": "\n".join(_table(*table) for table in tables),
        "HEAD": json.dumps(head, separators=(",", ":")).replace("<", "\\u003c"),
        "COLUMNS": base64.b64encode(gzip.compress(bytes(data), compresslevel=6, mtime=0)).decode("ascii"),
        "SCRIPT": page.joinpath("timeline.js").read_text(encoding="utf-8"),
    }
    pieces = page.joinpath("timeline.html").read_text(encoding="utf-8").split("@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _legend(timelines: Sequence[Timeline]) -> str:
    keys = []
    for key in facts.legend_entries(timelines):
        colours = [colour.hex for colour in key.colours]
        if not colours and key.kind != facts.SHADES:
            colours.append(f"var(--{key.kind})")
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
    """Both themes as CSS. The page takes the one that the reader's system prefers, until its button chooses one."""
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


class _Columns:
    """The columns of one timeline, one after another in ``data``. [offset in bytes, length] identifies a column."""

    def __init__(self, timeline: Timeline, data: bytearray) -> None:
        self.data = data
        self.slices = timeline.slices
        self.end = timeline.end or 1.0
        self.tick = self.end / _TICKS

    def add(self, typecode: str, values: Iterable[Any]) -> list[int]:
        """Appends a column of little-endian 32-bit values: whole numbers (``I``) or floats (``f``)."""
        column = array(typecode, values)
        offset = len(self.data)
        self.data += column.tobytes()
        return [offset, len(column)]

    def lane(self, lane: Lane, sent: Sequence[Sequence[Transfer]], most_steps: int) -> dict[str, Any]:
        memory = thinned(lane.memory, most_steps)
        return {
            "name": lane.name,
            "compute": self._events(lane.compute, _COMPUTE),
            "waits": self._events(lane.waits, _WAITS),
            "copyWaits": self._events(lane.waits, _COPY_WAITS),
            **{name: self._events(lane.copies, dict.fromkeys(ops, 0)) for name, ops in _STRIPS.items()},
            "activations": self._transfers(sent[0]),
            "gradients": self._transfers(sent[1]),
            "memory": {
                "times": self.add("I", (self._ticks(time) for time, _ in memory)),
                "values": self.add("f", (value for _, value in memory)),
                "peak": lane.peak,
            },
        }

    def _events(self, events: Sequence[Event], numbers: Mapping[str, int]) -> dict[str, list[int]]:
        """The columns of the events whose operation has a number in ``numbers``."""
        shown = [event for event in events if event.instruction.op in numbers]
        codes = []
        for at in (event.instruction for event in shown):
            codes.append(numbers[at.op] << 29 | at.chunk << 20 | self._slice_number(at))
        return self._spans(shown, codes)

    def _transfers(self, transfers: Sequence[Transfer]) -> dict[str, list[int]]:
        spans = self._spans(transfers, [self._slice_number(t) for t in transfers])
        return {**spans, "where": self.add("I", (t.target << 20 | t.stage for t in transfers))}

    def _slice_number(self, at: Instruction | Transfer) -> int:
        """The number of the slice, counted through all microbatches; the microbatch if sequences are not sliced."""
        return max(at.mb, 0) * self.slices + max(at.part, 0)

    def _spans(self, spans: Sequence[Event] | Sequence[Transfer], codes: list[int]) -> dict[str, list[int]]:
        return {
            "starts": self.add("I", (self._ticks(s.start) for s in spans)),
            "lengths": self.add("I", (self._ticks(s.end - s.start) for s in spans)),
            "codes": self.add("I", codes),
        }

    def _ticks(self, time: float) -> int:
        return min(2**32 - 1, max(0, round(time / self.tick)))


def _described(timeline: Timeline, data: bytearray) -> dict[str, Any]:
    """The page's description of ``timeline``; adds its columns to ``data``.

    Raises PlanError beyond 512 chunks or a million microbatches.
    """
    if timeline.num_chunks > _MOST_CHUNKS or timeline.num_microbatches * timeline.slices > _MOST_MICROBATCHES:
        raise PlanError(
            f"the page shows at most {_MOST_CHUNKS} chunks and {_MOST_MICROBATCHES} microbatches (or slices of them)"
        )
    columns = _Columns(timeline, data)
    most, of_all = _MOST_MEMORY_STEPS
    most = min(most, of_all // len(timeline.lanes))
    each = zip(timeline.lanes, timeline.sent(), timeline.stages, strict=True)
    shades = [[block_colour(op, c, timeline.num_chunks) for c in range(timeline.num_chunks)] for op in _COMPUTE]
    return {
        "title": timeline.title,
        "unit": timeline.unit,
        "end": columns.end,
        "tick": columns.tick,
        "chunks": timeline.num_chunks,
        "microbatches": timeline.num_microbatches,
        "slices": timeline.slices,
        "ops": [_COMPUTE[op] for op in timeline.ops],
        "shortBlock": timeline.short_block,
        "lanes": [{**columns.lane(lane, sent, most), "stages": list(stages)} for lane, sent, stages in each],
        "hasTransfers": timeline.has_transfers,
        "hasCopies": timeline.has_copies(*COPIES),
        "hasCollectives": timeline.has_copies(*COLLECTIVES),
        "inBytes": timeline.memory_in_bytes,
        "shades": [[colour.hex for colour in row] for row in shades],
        "inks": [[ink_on(colour).hex for colour in row] for row in shades],
    }
