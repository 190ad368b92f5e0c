"""Charts of values over the steps of a run, for a page: HTML and SVG without scripts."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from megatron_pp.tools.draw.facts import tick_step
from megatron_pp.tools.draw.timeline import thinned

_WIDE, _HIGH, _MOST_POINTS = 1000.0, 100.0, 2000
_COLOURS = "activation", "gradient"


class Curve(NamedTuple):
    """A curve of (step, value) points, ordered by step. A chart has at most two curves."""

    name: str
    points: Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """One chart. ``form`` is the format of a value, such as ``{:,.0f} tokens/s``."""

    title: str
    curves: Sequence[Curve]
    form: str


def render_charts(charts: Sequence[Chart]) -> str:
    """The HTML of the charts that have a finite value. Each shows the last value of its curves."""
    return "\n".join(filter(None, map(_chart, charts)))


def _chart(chart: Chart) -> str:
    curves = [(c.name, [(s, v) for s, v in c.points if math.isfinite(v)]) for c in chart.curves]
    curves = [(name, thinned(points, _MOST_POINTS)) for name, points in curves if points]
    if not curves:
        return ""
    steps, values = ([at[k] for _, points in curves for at in points] for k in (0, 1))
    ticks = _ticks(min(values), max(values))
    low, high, first, last = ticks[0], ticks[-1], min(steps), max(steps)

    def at(step: float, value: float) -> str:
        across = (step - first) / (last - first) if last > first else 0.5
        return f"{_WIDE * across:.1f},{_HIGH * (high - value) / (high - low):.2f}"

    lines = [f'<path class="rule" d="M{at(first, tick)}H{_WIDE:g}"/>' for tick in ticks if last > first]
    for (_, points), colour in zip(curves, _COLOURS, strict=False):
        path = "L".join(at(*point) for point in (points[0], *points))
        lines.append(f'<path style="stroke: var(--{colour})" d="M{path}"/>')
    keys = [
        f'<span class="key"><i class="thin" style="background:var(--{colour})"></i> '
        f"{escape(f'{name} {chart.form.format(points[-1][1])}'.strip())}</span>"
        for (name, points), colour in zip(curves, _COLOURS, strict=False)
    ]
    labels = [f'<span style="top: {100 * (high - tick) / (high - low):.1f}%">{tick:.6g}</span>' for tick in ticks]
    return (
        f"<figure><figcaption><b>{escape(chart.title)}</b> {' '.join(keys)}</figcaption>\n"
        f'<div class="plot"><div class="scale soft">{"".join(labels)}</div>'
        f'<svg viewBox="0 0 {_WIDE:g} {_HIGH:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(chart.title, quote=True)}">{"".join(lines)}</svg></div>\n'
        f'<div class="steps soft"><span>step {first:,.0f}</span><span>{last:,.0f}</span></div></figure>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round tick values from at most ``low`` and 0 up to at least ``high``."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = tick_step(high - low, 4) if high > low else 1.0
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * k for k in range(first, max(last, first + 1) + 1)]
