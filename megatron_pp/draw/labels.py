"""Whether the labels of blocks fit, and how large: measured in the font that pictures are drawn with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from megatron_pp.draw.timeline import Timeline

_LARGEST, _STACKED = 11.0, 9.5  # font sizes in pixels, at most, of labels in one line and in two
_GOOD, _SMALLEST = 7.5, 6.0
_NARROWEST, _USUAL, _WIDEST = 900, 1400, 2800  # pictures, in pixels
_ROOM = 3.0  # pixels around a label
_MEASURE = 100.0  # the font size that widths are measured at


class Labels(NamedTuple):
    """How the blocks of one timeline are labelled.

    size     of the font, in pixels
    chunks   how many chunks labels distinguish, as in block_name: all, or 1 where the shade alone shows the chunk
    stacked  the letter above the number
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
    """Pixels that ``text`` takes in a font of ``size`` pixels."""
    return _measured(text, bold) * size / _MEASURE


def choose_labels(timeline: Timeline, scale: float) -> Labels:
    """At ``scale`` pixels a unit: the first form in a good size, else the last one, in the smallest size at least."""
    room = timeline.short_block * scale - _ROOM
    for form in _forms(timeline):
        size = room / _widest(timeline, form)
        if size >= _GOOD:
            break
    return form._replace(size=min(_STACKED if form.stacked else _LARGEST, max(_SMALLEST, size)))


def fitting_width(timelines: Sequence[Timeline], margins: float) -> int:
    """The width at which all labels fit, in the first form that does so in a picture of usual width, else stacked
    without chunk; where not even that fits, the usual width.
    """
    end = max(t.end for t in timelines)
    for k, size, limit in ((0, _GOOD, _USUAL), (1, _GOOD, _USUAL), (-1, _GOOD, _WIDEST), (-1, _SMALLEST, _WIDEST)):
        forms = ((t, list(_forms(t))) for t in timelines)
        needed = ((_widest(t, f[min(k, len(f) - 1)]) * size + _ROOM) / (t.short_block or end or 1.0) for t, f in forms)
        width = math.ceil(margins + end * max(needed))
        if width <= limit:
            return max(width, _NARROWEST)
    return _USUAL


def _forms(timeline: Timeline) -> Iterator[Labels]:
    """Ways to write a label, the longest first."""
    yield Labels(1.0, timeline.num_chunks, stacked=False)
    yield Labels(1.0, timeline.num_chunks, stacked=True)
    if timeline.num_chunks > 1:
        yield Labels(1.0, 1, stacked=True)


def _widest(timeline: Timeline, form: Labels) -> float:
    """Width of the widest label, at the form's size."""
    number = f"{form.chunks - 1}." * (form.chunks > 1) + f"{timeline.num_microbatches - 1}"
    number += f"s{timeline.slices - 1}" * (timeline.slices > 1)
    lines = (line for op in timeline.ops for line in form.lines(op + number))
    return max((text_width(line, form.size) for line in lines), default=1.0)
