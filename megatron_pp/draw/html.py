"""Timelines as one HTML page without network access: zoom, hover, memory below each rank, light and dark.

Blocks are drawn on a canvas from compressed columns: half a million of them take a few megabytes.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from megatron_pp.draw.columns import ColumnStore, timeline_columns
from megatron_pp.draw.palette import NAMES, OPERATIONS
from megatron_pp.draw.timeline import Timeline

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # heading, column names, rows


def render_html(timelines: Sequence[Timeline], title: str, tables: Sequence[Table] = ()) -> str:
    """One page with ``timelines`` one below the other on a common time axis, and ``tables`` of text after them."""
    store = ColumnStore()
    head = {"timelines": [timeline_columns(t, store) for t in timelines]}
    page = files("megatron_pp.draw").joinpath("page")
    parts = {
        "TITLE": escape(title),
        "STYLE": page.joinpath("timeline.css").read_text(encoding="utf-8"),
        "LEGEND": _legend(timelines),
        "CHARTS": "\n".join(_chart(k, t) for k, t in enumerate(timelines)),
        "TABLES": "\n".join(_table(*table) for table in tables),
        "HEAD": json.dumps(head, separators=(",", ":")).replace("<", "\\u003c"),
        "COLUMNS": base64.b64encode(gzip.compress(bytes(store.data), compresslevel=6, mtime=0)).decode("ascii"),
        "SCRIPT": page.joinpath("timeline.js").read_text(encoding="utf-8"),
    }
    pieces = page.joinpath("timeline.html").read_text(encoding="utf-8").split("@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _legend(timelines: Sequence[Timeline]) -> str:
    ops = {op for t in timelines for op in t.ops}
    keys = [f'<i style="background:{OPERATIONS[op].hex}"></i>{NAMES[op]}' for op in OPERATIONS if op in ops]
    if any(t.num_chunks > 1 for t in timelines):
        keys.append("lighter: later chunks")
    keys.append('<i style="background:var(--idle);border:1px solid var(--rule)"></i>idle')
    if any(t.has_waits for t in timelines):
        keys.append('<i class="thin" style="background:var(--wait)"></i>waiting for a transfer')
    if any(t.has_transfers for t in timelines):
        keys.append('<i class="thin" style="background:var(--act)"></i>activation on its way')
        keys.append('<i class="thin" style="background:var(--grad)"></i>gradient on its way')
    if any(lane.memory for t in timelines for lane in t.lanes):
        keys.append('<i style="background:var(--memory-fill);border-top:1px solid var(--memory)"></i>memory')
    return "\n".join(f'<span class="key">{key}</span>' for key in keys)


def _chart(number: int, timeline: Timeline) -> str:
    facts = f"{len(timeline.lanes)} ranks, {timeline.num_blocks} operations, bubble {timeline.bubble_share:.1%}"
    label = escape(f"{timeline.title}: {facts}", quote=True)
    return (
        f'<h2>{escape(timeline.title)} <span class="soft">{escape(facts)}</span></h2>\n'
        f'<canvas id="chart{number}" role="img" aria-label="{label}"></canvas>'
    )


def _table(heading: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h2>{escape(heading)}</h2>\n<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
