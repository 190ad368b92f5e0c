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
from megatron_pp.draw.facts import (
    ACTIVATION,
    GRADIENT,
    LOADING,
    MEMORY,
    OFFLOADING,
    SHADES,
    WAIT,
    costs_line,
    legend_keys,
    summary,
)
from megatron_pp.draw.palette import DARK, LIGHT, NAMES
from megatron_pp.draw.ticks import value_ticks
from megatron_pp.draw.timeline import Timeline

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # heading, column names, rows


def render_html(timelines: Sequence[Timeline], title: str, tables: Sequence[Table] = ()) -> str:
    """One page with ``timelines`` one below the other on a common time axis, and ``tables`` of text after them."""
    store = ColumnStore()
    most = max(t.most_memory for t in timelines)
    head = {
        "names": NAMES,
        "mostMemory": most,
        "memoryTicks": value_ticks(most, timelines[0].memory_in_bytes),
        "timelines": [timeline_columns(t, store) for t in timelines],
    }
    page = files("megatron_pp.draw").joinpath("page")
    parts = {
        "TITLE": escape(title),
        "COSTS": escape(costs_line(timelines)),
        "STYLE": _colours() + page.joinpath("timeline.css").read_text(encoding="utf-8"),
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
    keys = []
    for key in legend_keys(timelines):
        colours = [colour.hex for colour in key.colours] or ([f"var(--{key.kind})"] if key.kind != SHADES else [])
        if key.kind == MEMORY:
            colours.append("var(--memory_last)")
        thin = ' class="thin"' if key.kind in (WAIT, ACTIVATION, GRADIENT, OFFLOADING, LOADING, MEMORY) else ""
        boxes = "".join(f'<i{thin} style="background:{colour}"></i>' for colour in colours)
        keys.append(f'<span class="key">{boxes} {escape(key.label)}</span>')
    return "\n".join(keys)


def _chart(number: int, timeline: Timeline) -> str:
    facts = ", ".join(summary(timeline))
    label = escape(f"{timeline.title}: {facts}", quote=True)
    note = f'<p class="note">{escape(timeline.note)}</p>\n' if timeline.note else ""
    return (
        f'<h2>{escape(timeline.title)} <span class="soft">{escape(facts)}</span></h2>\n{note}'
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
    return f"<h2>{escape(heading)}</h2>\n<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
