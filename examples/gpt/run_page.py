"""Writes the page of a run beside its metrics: values over its steps, and one step beside its prediction."""

from __future__ import annotations

from pathlib import Path

from examples.gpt.curves import Chart, Curve, render_charts
from examples.gpt.files import write_atomically
from examples.gpt.metrics import METRICS, read_metrics
from megatron_pp.errors import PlanError
from megatron_pp.tools.draw.html import render_html
from megatron_pp.tools.trace_report import beside_prediction

REPORT = "report.html"
_FIRST, _STEPS = 8, 3  # steps after a start: behind its slow first ones, and few enough to cost almost nothing
_CHARTS = (
    ("loss, nats per byte", {"training": "loss", "validation": "validation_loss"}, "{:.3f}"),
    ("speed", {"": "tokens_per_second"}, "{:,.0f} tokens/s"),
    ("bubble: idle share of the ranks", {"": "bubble"}, "{:.1%}"),
    ("peak memory of a process", {"": "peak_memory_gib"}, "{:.2f} GiB"),
)


def steps_to_record(done: int, last: int) -> str | None:
    """The steps to record by default in a run from ``done`` to ``last``; the page shows one of them. None: no step."""
    first = min(done + _FIRST, max(done + 1, last - _STEPS + 1))
    return f"{first}-{min(first + _STEPS - 1, last)}" if done < last else None


def write_page(folder: Path, traces: Path, title: str) -> Path:
    """Write the page of the run in ``folder``, and return its path. It has no timeline if ``traces`` has no step of all
    ranks, as on several machines without a shared folder. Raises OSError."""
    records = read_metrics(folder / METRICS)
    charts = [
        Chart(name, [Curve(of, [(r["step"], r[key]) for r in records if key in r]) for of, key in keys.items()], form)
        for name, keys, form in _CHARTS
    ]
    try:
        timelines, tables = beside_prediction(traces)
    except PlanError as error:
        timelines, tables = [], [("No timeline", [], [[str(error)]])]
    write_atomically(folder / REPORT, render_html(timelines, title, tables, render_charts(charts)))
    return folder / REPORT
