"""Timelines as pictures: terminal text, the classic grid, SVG, PNG, HTML, and Chrome's trace format.

In a notebook::

    from megatron_pp import draw
    from megatron_pp.plan.builder import build_plan
    from megatron_pp.plan.costs.stage_costs import StageCosts
    from megatron_pp.plan.simulate.simulator import simulate
    from megatron_pp.plan.ir.spec import PlanSpec

    plans = [build_plan(PlanSpec(name, 4, v, 8)) for name, v in (("1f1b", 1), ("zb_v", 2))]
    costs = StageCosts.uniform(1, 4, 4, 4)  # of the whole model: each of 4 ranks takes 1 for F, I and W
    steps = [simulate(plan, costs.regrouped(plan.placement.num_stages)) for plan in plans]
    IPython.display.SVG(draw.svg([draw.simulated_timeline(step) for step in steps]))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_pp.errors import MegatronPPError
from megatron_pp.tools.draw.html import render_html
from megatron_pp.tools.draw.pareto_front import Point, front_figure
from megatron_pp.tools.draw.timeline import Timeline, simulated_timeline

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.figure import Figure

__all__ = ["Point", "Timeline", "figure", "front", "png", "render_html", "simulated_timeline", "svg"]


def figure(timelines: Sequence[Timeline], width: int | None = None, dark: bool = False) -> Figure:
    """The timelines on one time axis as a matplotlib figure.

    ``width`` is in pixels; by default the labels determine it (900 to 2800). ``dark`` draws on dark paper. Raises
    MegatronPPError if matplotlib is missing.
    """
    return _with_matplotlib().figure(timelines, width, dark)


def svg(timelines: Sequence[Timeline], width: int | None = None, dark: bool = False) -> str:
    """The figure as SVG. The same timelines give the same text. A viewer that prefers dark colours shows it on dark
    paper. Raises as ``figure`` does."""
    figures = _with_matplotlib()
    title = ", ".join(timeline.title for timeline in timelines)
    ranks = max(len(t.lanes) for t in timelines)
    return figures.as_svg(partial(figures.figure, timelines, width, dark), title, ranks)


def png(timelines: Sequence[Timeline], width: int | None = None, dark: bool = False) -> bytes:
    """The figure as PNG, with two dots a pixel. Raises as ``figure`` does, and PlanError if it would be too large."""
    figures = _with_matplotlib()
    return figures.as_png(partial(figures.figure, timelines, width, dark))


def front(points: Sequence[Point], limit: float, as_png: bool = False) -> str | bytes:
    """A chart of step time against memory as SVG or PNG; ``megatron-pp advise --plot`` writes it.

    ``limit`` is the memory of a device in GB. Raises as ``figure`` does.
    """
    figures = _with_matplotlib()
    drawing = partial(front_figure, points, limit)
    return figures.as_png(drawing) if as_png else figures.as_svg(drawing, "Step time against memory")


def require_matplotlib() -> None:
    """Raises MegatronPPError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MegatronPPError("SVG and PNG pictures need matplotlib: pip install '.[viz]'") from error


def _with_matplotlib() -> ModuleType:
    """The module that draws with matplotlib. It is imported late: matplotlib takes long to load and may be missing."""
    require_matplotlib()
    from megatron_pp.tools.draw import figures

    return figures
