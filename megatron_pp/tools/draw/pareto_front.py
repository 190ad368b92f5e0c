"""A chart of pipelines: step time against memory, with the line of the best trade-offs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_pp.tools.draw.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of the figure, in pixels.
_WIDTH = 760
_HEIGHT = 420
_TEXT = 11.0
_FAR = 1.6  # points that are slower than the best by more than this are left out


class Point(NamedTuple):
    """A pipeline: the GB of its fullest rank, the milliseconds of a step, its name, and whether it is on the Pareto
    front."""

    memory: float
    step: float
    name: str
    in_front: bool


def front_figure(points: Sequence[Point], limit: float) -> Figure:
    """The points as a matplotlib figure of 72 dots an inch.

    The fastest point is marked. A memory limit of at most 1.5 times the largest memory is drawn as a line.
    """
    from matplotlib.figure import Figure

    paper, ink, soft, line = (colour.hex for colour in (LIGHT.paper, LIGHT.ink, LIGHT.soft, LIGHT.activation))
    best = min(points, key=lambda one: (one.step, one.memory))
    shown = [one for one in points if one.step <= _FAR * best.step]
    drawn = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72, facecolor=paper, layout="constrained")
    axes = drawn.add_subplot(facecolor=paper)
    front = sorted(one for one in shown if one.in_front)
    others = [one for one in shown if not one.in_front]
    axes.scatter([p.memory for p in others], [p.step for p in others], s=26, color=LIGHT.wait.hex, zorder=2)
    axes.plot([p.memory for p in front], [p.step for p in front], "-o", drawstyle="steps-post", color=line, zorder=3)
    axes.plot([best.memory], [best.step], "o", color=LIGHT.gradient.hex, markersize=11, zorder=4)
    most = max(one.memory for one in shown)
    if limit <= 1.5 * most:
        axes.axvline(limit, color=LIGHT.gradient.hex, linewidth=1, linestyle="--")
    for one in _apart(front, most, best.step):
        axes.annotate(one.name, (one.memory, one.step), (6, 6), textcoords="offset points", color=ink, fontsize=_TEXT)
    axes.set_xlabel("memory of the fullest rank, GB", color=soft, fontsize=_TEXT)
    axes.set_ylabel("step, ms", color=soft, fontsize=_TEXT)
    axes.set_xlim(0, 1.25 * most or 1.0)
    axes.tick_params(colors=soft, labelsize=_TEXT)
    for spine in axes.spines.values():
        spine.set_color(LIGHT.rule.hex)
    axes.grid(color=LIGHT.rule.hex, linewidth=0.5)
    axes.set_axisbelow(True)
    return drawn


def _apart(points: Sequence[Point], most: float, least_step: float) -> list[Point]:
    """Points whose names do not overlap. If two names overlap, the faster point keeps its name."""
    named: list[Point] = []
    for one in sorted(points, key=lambda point: point.step):
        if all(
            abs(one.memory - other.memory) > 0.16 * most or abs(one.step - other.step) > 0.03 * least_step
            for other in named
        ):
            named.append(one)
    return named
