"""Timelines below each other on one time axis, each with the memory of its ranks, as matplotlib figure, SVG or PNG.

Positions are in pixels from the top left corner. Text in an SVG stays text, and the same drawing gives the same bytes.
"""

import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.textpath import TextToPath

from megatron_pp.errors import PlanError
from megatron_pp.tools.draw import facts
from megatron_pp.tools.draw.palette import DARK, LIGHT, OPERATIONS, Colour, Theme, block_colour, block_name, ink_on
from megatron_pp.tools.draw.timeline import COLLECTIVES, COPIES, Lane, Timeline, pieces, thinned

_DOTS = 2  # dots of a PNG per pixel
_MOST_DOTS = 10**8
_MOST_SIDE = 2**16 - 1
_TEXT = 12.0  # pixels
_LEFT = 62.0
_RIGHT = 14.0
_ROW = 22.0
_ROW_GAP = 5.0
_STRIP = 3.0
_CURVES = 64.0
_GAP = 22.0
_FAMILY = "'DejaVu Sans', Verdana, Arial, sans-serif"
# The largest font sizes, in pixels, of labels in one line and in two lines, and further sizes.
_LARGEST = 11.0
_STACKED = 9.5
_GOOD = 7.5
_SMALLEST = 6.0
# Widths of pictures, in pixels.
_NARROWEST = 900
_USUAL = 1400
_WIDEST = 2800
_ROOM = 3.0  # pixels around a label
_MEASURE = 100.0  # the font size at which widths are measured
_RC = {"font.family": "DejaVu Sans", "svg.fonttype": "none", "svg.hashsalt": "megatron_pp"}


def as_svg(drawing: Callable[[], Figure], title: str, ranks: int = 1) -> str:
    """The SVG of the figure that ``drawing`` makes, at 72 dots an inch.

    A viewer that prefers dark colours shows a light figure on dark paper. ``ranks`` is the number of ranks in a memory
    chart.
    """
    out = io.StringIO()
    with style.context(["default", _RC]):
        FigureCanvasSVG(drawing()).print_svg(out, metadata={"Title": title, "Date": None, "Creator": None})
    # Sizes become pixels, the font is named once instead of at every text, and rotations by 0 degrees are removed.
    svg = re.sub(r'width="([\d.]+)pt" height="([\d.]+)pt"', r'width="\1" height="\2"', out.getvalue(), count=1)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"|; font-family: [^;]*', "", svg)
    svg = svg.replace("*{", f"*{{font-family: {_FAMILY}; ", 1)
    return svg.replace("</style>", f"{_in_the_dark(svg, ranks)}</style>", 1)


def _in_the_dark(svg: str, ranks: int) -> str:
    """CSS rules that replace the light theme's colours. The paper's colour is replaced in paths only, so that white
    labels stay white."""
    if f"fill: {DARK.paper.hex}" in svg:
        return ""
    pairs = [*zip(LIGHT, DARK, strict=True), *zip(_ramp(LIGHT, ranks), _ramp(DARK, ranks), strict=True)]
    rules = [
        f'{"path" if light is LIGHT.paper else ""}[style*="{kind}: {light.hex}"] {{{kind}: {dark.hex} !important}}'
        for light, dark in dict(pairs).items()
        for kind in ("fill", "stroke")
        if f"{kind}: {light.hex}" in svg
    ]
    return f" @media (prefers-color-scheme: dark) {{{' '.join(rules)}}}"


def _ramp(theme: Theme, ranks: int) -> list[Colour]:
    """The colours of the memory of each rank."""
    return [theme.memory.mixed(theme.memory_last, rank / max(1, ranks - 1)) for rank in range(ranks)]


def as_png(drawing: Callable[[], Figure]) -> bytes:
    """The PNG of the figure that ``drawing`` makes, with two dots a pixel. Raises PlanError if it would be too
    large."""
    out = io.BytesIO()
    with style.context(["default", _RC]):
        drawn = drawing()
        drawn.set_dpi(72 * _DOTS)
        across, down = (round(side) for side in drawn.get_size_inches() * drawn.dpi)
        if max(across, down) > _MOST_SIDE or across * down > _MOST_DOTS:
            raise PlanError(
                f"the PNG would have {across} x {down} dots; at most {_MOST_SIDE} dots a side and {_MOST_DOTS:,} in "
                "all are possible. Draw fewer schedules, a narrower picture, or HTML, which has no limit"
            )
        FigureCanvasAgg(drawn).print_png(out, metadata={"Software": None})
    return out.getvalue()


def figure(timelines: Sequence[Timeline], width: int | None = None, dark: bool = False) -> Figure:
    """The picture as a matplotlib figure of 72 dots an inch, so that a point is a pixel."""
    return _Picture(timelines, float(width or fitting_width(timelines, _LEFT + _RIGHT)), DARK if dark else LIGHT).drawn


class Labels(NamedTuple):
    """How the blocks of one timeline are labelled.

    size     font size in pixels
    chunks   number of chunks that labels distinguish, as in block_name: all, or 1 if only the shade shows the chunk
    stacked  the letter stands above the number
    """

    size: float
    chunks: int
    stacked: bool

    def lines(self, name: str) -> tuple[str, ...]:
        return (name[0], name[1:]) if self.stacked else (name,)


@lru_cache(maxsize=4096)
def _measured(text: str, bold: bool) -> float:
    font = FontProperties(family="DejaVu Sans", size=_MEASURE, weight="bold" if bold else "normal")
    return float(TextToPath().get_text_width_height_descent(text, font, ismath=False)[0])


def text_width(text: str, size: float, bold: bool = False) -> float:
    """The width of ``text`` in pixels, in a font of ``size`` pixels."""
    return _measured(text, bold) * size / _MEASURE


def choose_labels(timeline: Timeline, scale: float) -> Labels:
    """The first form of label that has a good font size at ``scale`` pixels a unit of time; otherwise the last form,
    no smaller than the smallest font size."""
    room = timeline.short_block * scale - _ROOM
    for form in _forms(timeline):
        size = room / _widest(timeline, form)
        if size >= _GOOD:
            break
    return form._replace(size=min(_STACKED if form.stacked else _LARGEST, max(_SMALLEST, size)))


def fitting_width(timelines: Sequence[Timeline], margins: float) -> int:
    """The width of a picture in which all labels fit.

    It tries the longest form of labels and the stacked form, up to the usual width; then the shortest form, up to the
    widest picture. If no form fits, it returns the usual width.
    """
    end = max(t.end for t in timelines)
    for number, size, most in ((0, _GOOD, _USUAL), (1, _GOOD, _USUAL), (-1, _GOOD, _WIDEST), (-1, _SMALLEST, _WIDEST)):
        scale = 0.0  # pixels a unit of time
        for timeline in timelines:
            forms = list(_forms(timeline))
            label = size * _widest(timeline, forms[min(number, len(forms) - 1)]) + _ROOM
            scale = max(scale, label / (timeline.short_block or end or 1.0))
        width = math.ceil(margins + end * scale)
        if width <= most:
            return max(width, _NARROWEST)
    return _USUAL


def _forms(timeline: Timeline) -> Iterator[Labels]:
    """The ways to write a label, the longest first."""
    yield Labels(1.0, timeline.num_chunks, stacked=False)
    yield Labels(1.0, timeline.num_chunks, stacked=True)
    if timeline.num_chunks > 1:
        yield Labels(1.0, 1, stacked=True)


def _widest(timeline: Timeline, form: Labels) -> float:
    """The width of the widest label, in the form's font size."""
    number = f"{form.chunks - 1}." * (form.chunks > 1) + f"{timeline.num_microbatches - 1}"
    number += f"s{timeline.slices - 1}" * (timeline.slices > 1)
    lines = (line for op in timeline.ops for line in form.lines(op + number))
    return max((text_width(line, form.size) for line in lines), default=1.0)


class _Picture:
    """One figure. A single pair of axes, in pixels, covers it."""

    def __init__(self, timelines: Sequence[Timeline], width: float, theme: Theme) -> None:
        self.timelines = timelines
        self.width = width
        self.theme = theme
        self.end = max(t.end for t in timelines) or 1.0
        self.scale = (width - _LEFT - _RIGHT) / self.end
        self.shapes: dict[tuple[Colour, float], list[list[tuple[float, float]]]] = defaultdict(list)
        self.texts: list[tuple[float, float, str, dict[str, Any]]] = []
        self.curves: list[tuple[list[tuple[float, float]], Colour]] = []
        self.panels: list[tuple[float, float]] = []
        bottom = self._axis(self._panels(self._heading()))
        self.drawn = self._figure(bottom + 10)

    # ---- primitives: they are collected first, because the height of the figure follows from its content

    def _box(self, x: float, y: float, width: float, height: float, colour: Colour, order: float = 2.0) -> None:
        left = round(x, 1)
        top = round(y, 1)
        right = round(x + width, 1)
        bottom = round(y + height, 1)
        self.shapes[colour, order].append([(left, top), (right, top), (right, bottom), (left, bottom)])

    def _text(
        self, x: float, y: float, text: str, colour: Colour, size: float = _TEXT, ha: str = "left", bold: bool = False
    ) -> None:
        """``y`` is the baseline."""
        look: dict[str, Any] = {"color": colour.hex, "fontsize": size, "ha": ha}
        self.texts.append((round(x, 1), round(y, 1), text, look | ({"fontweight": "bold"} if bold else {})))

    def _figure(self, height: float) -> Figure:
        drawn = Figure(figsize=(self.width / 72, height / 72), dpi=72, facecolor=self.theme.paper.hex)
        axes: Axes = drawn.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(height, 0))
        axes.set_axis_off()
        for (colour, order), boxes in self.shapes.items():
            path = Path.make_compound_path(*(Path([*box, box[0]], closed=True) for box in boxes))
            axes.add_artist(PathPatch(path, fc=colour.hex, lw=0, zorder=order, clip_on=False))
        for points, colour in self.curves:
            axes.add_artist(PathPatch(Path(points), fc="none", ec=colour.hex, lw=1.4, zorder=3, clip_on=False))
        for x, y, text, look in self.texts:
            axes.add_artist(Text(x, y, text, va="baseline", zorder=4, parse_math=False, **look))
        return drawn

    # ---- parts of the figure, from top to bottom

    def _heading(self) -> float:
        """Writes the costs and the legend. Returns the y below them."""
        y = self._lines(22.0, facts.costs_line(self.timelines).split(" "), self.theme.ink)
        x, y = 10.0, y + 20
        for key in facts.legend_entries(self.timelines):
            colours = self._entry_colours(key)
            wide = len(colours) * 12 + 6 + text_width(key.label, _TEXT)
            if x > 10 and x + wide > self.width - 10:
                x, y = 10.0, y + 18
            for k, colour in enumerate(colours):
                thick = 12 if key.kind in OPERATIONS or key.kind == facts.IDLE else 4
                self._box(x + 12 * k, y - 4 - thick / 2, 12, thick, colour)
            y = self._lines(y, key.label.split(" "), self.theme.ink, x + 12 * len(colours) + 5)
            x += wide + 18
        return y + 10

    def _lines(
        self, y: float, parts: Sequence[str], colour: Colour, left: float = 10, between: str = " ", **look: Any
    ) -> float:
        """Writes ``parts`` from ``y`` on, as many in each line as fit. Returns the last baseline."""
        line = parts[0]
        for part in parts[1:]:
            if left + text_width(line + between + part, look.get("size", _TEXT), "bold" in look) > self.width - 10:
                self._text(left, y, line + between.rstrip(), colour, **look)
                line = part
                y += 17
            else:
                line += between + part
        self._text(left, y, line, colour, **look)
        return y

    def _entry_colours(self, key: facts.LegendEntry) -> Sequence[Colour]:
        if key.kind == facts.SHADES:
            return ()
        if key.kind == facts.MEMORY:
            return _ramp(self.theme, max(len(t.lanes) for t in self.timelines))
        return key.colours or (getattr(self.theme, key.kind),)

    def _panels(self, y: float) -> float:
        most = max(t.most_memory for t in self.timelines)
        for timeline in self.timelines:
            top = self._title(timeline, y + _GAP) + 8
            y = self._rows(timeline, top)
            if most:
                y = self._memory(timeline, most, y + 6)
            self.panels.append((top, y))
        return y

    def _title(self, timeline: Timeline, y: float) -> float:
        y = self._lines(y, timeline.title.split(" "), self.theme.ink, size=13, bold=True)
        x = 10 + text_width(timeline.title, 13, bold=True) + 14
        numbers = facts.summary(timeline)
        if x + text_width(",  ".join(numbers), _TEXT) > self.width - 10:
            y = self._lines(y + 17, numbers, self.theme.soft, between=",  ")
        else:
            self._text(x, y, ",  ".join(numbers), self.theme.soft)
        return self._lines(y + 17, timeline.note.split(" "), self.theme.gradient) if timeline.note else y

    def _rows(self, timeline: Timeline, y: float) -> float:
        labels = choose_labels(timeline, self.scale)
        theme = self.theme
        colours = [theme.activation, theme.gradient] if timeline.has_transfers else []
        colours += [theme.offload, theme.load] if timeline.has_copies(*COPIES) else []
        colours += [theme.gather, theme.scatter] if timeline.has_copies(*COLLECTIVES) else []
        pitch = _ROW + len(colours) * (_STRIP + 1) + _ROW_GAP
        for rank, (lane, strips) in enumerate(zip(timeline.lanes, timeline.strips(), strict=True)):
            top = y + rank * pitch
            self._text(_LEFT - 8, top + _ROW / 2 + 4, lane.name, self.theme.ink, 11, ha="right")
            self._box(_LEFT, top, timeline.end * self.scale, _ROW, self.theme.idle, 1)
            self._strip(((e.start, e.end) for e in lane.waits), top + _ROW / 2 - 2, 4, self.theme.wait)
            self._blocks(timeline, lane, top, labels)
            for k, (spans, colour) in enumerate(zip(strips, colours, strict=True)):
                below = top + _ROW + 1 + k * (_STRIP + 1)
                self._strip(((t.start, t.end) for t in spans), below, _STRIP, colour)
        return y + pitch * len(timeline.lanes) - _ROW_GAP

    def _blocks(self, timeline: Timeline, lane: Lane, top: float, labels: Labels) -> None:
        for piece in pieces(lane.compute, self.scale):
            x = _LEFT + piece.left
            below = top
            for op, share in piece.shares:
                self._box(x, below, 1, share * _ROW, OPERATIONS[op])
                below += share * _ROW
            if piece.event is None:
                continue
            at = piece.event.instruction
            width = piece.right - piece.left
            colour = block_colour(at.op, at.chunk, timeline.num_chunks)
            self._box(x, top, max(width - 0.7, 0.6), _ROW, colour)
            lines = labels.lines(block_name(at, labels.chunks))
            if max(text_width(line, labels.size) for line in lines) + 1.5 <= width:
                first = top + _ROW / 2 + labels.size * (0.36 if len(lines) == 1 else -0.12)
                for k, line in enumerate(lines):
                    below = first + 0.98 * k * labels.size
                    self._text(x + width / 2 - 0.3, below, line, ink_on(colour), labels.size, "center")

    def _strip(self, spans: Iterable[tuple[float, float]], y: float, height: float, colour: Colour) -> None:
        """Draws thin bars. Bars that touch are drawn as one."""
        left = right = -1.0
        for start, end in spans:
            start = _LEFT + start * self.scale
            end = _LEFT + end * self.scale
            if start > right + 0.3:
                if right > left:
                    self._box(left, y, right - left, height, colour)
                left = start
            right = max(right, end, start + 0.7)
        if right > left:
            self._box(left, y, right - left, height, colour)

    def _memory(self, timeline: Timeline, most: float, y: float) -> float:
        """Draws a memory curve for each rank. All schedules have the same scale."""
        floor = y + _CURVES
        for value, name in facts.value_ticks(most, timeline.memory_in_bytes):
            at = floor - value / most * (_CURVES - 6)
            self._box(_LEFT, at - 0.4, self.end * self.scale, 0.8, self.theme.rule, 1)
            self._text(_LEFT - 8, at + 3.5, name, self.theme.soft, 10, ha="right")
        for lane, colour in zip(timeline.lanes, _ramp(self.theme, len(timeline.lanes)), strict=True):
            points: list[tuple[float, float]] = []
            for (time, value), (until, _) in pairwise([*thinned(lane.memory, int(self.width)), (timeline.end, 0.0)]):
                at = round(floor - value / most * (_CURVES - 6), 1)
                points += [(round(_LEFT + t * self.scale, 1), at) for t in (time, until)]
            self.curves.append((points, colour))
        return floor

    def _axis(self, y: float) -> float:
        step = facts.tick_step(self.end, int((self.width - _LEFT) / 80))
        for k in range(int(self.end / step + 1e-9) + 1):
            x = _LEFT + k * step * self.scale
            self._box(x - 0.4, y, 0.8, 6, self.theme.soft, 1)
            self._text(x, y + 18, facts.tick_label(k * step, step), self.theme.soft, 11, ha="center")
            for top, floor in self.panels:
                self._box(x - 0.4, top, 0.8, floor - top, self.theme.rule, 0)
        self._text(_LEFT - 8, y + 18, self.timelines[0].unit, self.theme.soft, 11, ha="right")
        return y + 18
