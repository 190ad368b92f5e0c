"""A timeline as a PNG picture, drawn with matplotlib."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from megatron_pp.draw.columns import thinned
from megatron_pp.draw.merged import pieces
from megatron_pp.draw.palette import MEMORY, NAMES, OPERATIONS, WAIT, block_colour, block_name, ink_on
from megatron_pp.draw.ticks import size_label
from megatron_pp.draw.timeline import Lane, Timeline

_IDLE, _DARK_IDLE = "#f1f2f4", "#22272d"
_LETTER = 6.6


def render_png(timelines: Timeline | Sequence[Timeline], width: int = 1600, dark: bool = False) -> bytes:
    """The picture, ``width`` pixels wide; several timelines stand below each other on a common time axis."""
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    dpi = 100
    lane_pixels = 44 if any(t.most_memory for t in shown) else 30
    height = 40 + sum(90 + lane_pixels * len(t.lanes) for t in shown)
    with style.context("dark_background" if dark else "default"):
        figure = Figure(figsize=(width / dpi, height / dpi), dpi=dpi)
        canvas = FigureCanvasAgg(figure)
        ratios = {"height_ratios": [len(t.lanes) + 1 for t in shown]}
        grid = figure.subplots(len(shown), 1, squeeze=False, gridspec_kw=ratios)
        end = max(t.end for t in shown) or 1.0
        for axes, timeline in zip(grid[:, 0], shown, strict=True):
            _draw(axes, timeline, end, width - 170, dark)
        figure.tight_layout()
        out = io.BytesIO()
        canvas.print_png(out)
    return out.getvalue()


def _draw(axes: Axes, timeline: Timeline, end: float, pixels: float, dark: bool) -> None:
    scale = pixels / end
    for k, lane in enumerate(timeline.lanes):
        axes.broken_barh([(0, timeline.end)], (k - 0.38, 0.5), facecolors=_DARK_IDLE if dark else _IDLE)
        axes.broken_barh([(e.start, e.end - e.start) for e in lane.waits], (k - 0.17, 0.08), facecolors=WAIT.hex)
        _draw_blocks(axes, timeline, lane, k, scale)
        if lane.memory:
            _draw_memory(axes, timeline, lane, k)
    axes.set_xlim(0, end)
    axes.set_ylim(len(timeline.lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(timeline.lanes)), [lane.name for lane in timeline.lanes])
    axes.set_xlabel(timeline.unit)
    axes.set_title(f"{timeline.title}   bubble {timeline.bubble_share:.1%}", loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(handles=_keys(timeline), loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, fontsize=9)


def _draw_blocks(axes: Axes, timeline: Timeline, lane: Lane, k: int, scale: float) -> None:
    bars: list[tuple[float, float]] = []
    colours: list[str] = []
    thin: dict[str, list[tuple[float, float, float]]] = defaultdict(list)  # by operation: left, bottom, height
    named_chunks = timeline.named_chunks(scale, _LETTER)
    for piece in pieces(lane.compute, scale):
        if piece.event is None:
            bottom = k + 0.12
            for op, share in piece.shares:
                thin[op].append((piece.left / scale, bottom, -0.5 * share))
                bottom -= 0.5 * share
            continue
        at = piece.event.instruction
        colour = block_colour(at.op, at.chunk, timeline.num_chunks)
        width = piece.right - piece.left
        bars.append((piece.left / scale, max(width - 0.8, 0.6) / scale))
        colours.append(colour.hex)
        label = block_name(at, named_chunks)
        if _LETTER * len(label) + 2 < width:
            middle = (piece.left + width / 2) / scale
            axes.text(middle, k - 0.13, label, ha="center", va="center", fontsize=8, color=ink_on(colour).hex)
    axes.broken_barh(bars, (k - 0.38, 0.5), facecolors=colours)
    for op, bits in thin.items():
        lefts, bottoms, heights = zip(*bits, strict=True)
        axes.bar(lefts, heights, width=1 / scale, bottom=bottoms, align="edge", color=OPERATIONS[op].hex, linewidth=0)


def _draw_memory(axes: Axes, timeline: Timeline, lane: Lane, k: int) -> None:
    steps, most = thinned(lane.memory, 4000), timeline.most_memory
    times = [t for t, _ in steps] + [timeline.end]
    base = k + 0.5
    heights = [base - 0.3 * v / most for _, v in steps]
    heights.append(heights[-1])
    axes.fill_between(times, base, heights, step="post", color=MEMORY.hex, alpha=0.35, linewidth=0.8)
    halo = [withStroke(linewidth=3, foreground=axes.get_facecolor())]
    note = f"peak {size_label(lane.peak)} "
    axes.text(timeline.end, k + 0.3, note, ha="right", va="center", fontsize=7, path_effects=halo)


def _keys(timeline: Timeline) -> list[Patch]:
    keys = [Patch(color=OPERATIONS[op].hex, label=NAMES[op]) for op in timeline.ops]
    if timeline.num_chunks > 1:
        keys.append(Patch(color="none", label="lighter: later chunks"))
    if timeline.has_waits:
        keys.append(Patch(color=WAIT.hex, label="waiting"))
    if timeline.most_memory:
        keys.append(Patch(color=MEMORY.hex, alpha=0.5, label="memory"))
    return keys
