"""Whether the labels of blocks fit, and how large: measured in the font that pictures are drawn with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from megatron_pp.draw.timeline import Timeline

_LARGEST, _GOOD, _SMALLEST = 11.0, 7.0, 6.0  # font sizes in pixels
_NARROWEST, _UNLABELLED, _WIDEST = 900, 1400, 2800
_ROOM = 3.0  # around a label
_MEASURE = 100.0  # the size that widths are measured at


@lru_cache(maxsize=4096)
def _measured(text: str, bold: bool) -> float:
    font = FontProperties(family="DejaVu Sans", size=_MEASURE, weight="bold" if bold else "normal")
    return float(TextToPath().get_text_width_height_descent(text, font, ismath=False)[0])


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Pixels that ``text`` takes in a font of ``size`` pixels."""
    return _measured(text, bold) * size / _MEASURE


def _longest(timeline: Timeline, num_chunks: int) -> float:
    """Width at size 1 of the widest label, with the chunk in it (as in block_name) or without."""
    chunk = f"{num_chunks - 1}." if num_chunks > 1 else ""
    return max((text_width(f"{op}{chunk}{timeline.num_microbatches - 1}", 1.0) for op in timeline.ops), default=1.0)


def choose_labels(timeline: Timeline, scale: float) -> tuple[float, int]:
    """The size of a timeline's labels at ``scale`` pixels a unit, and how many chunks they distinguish: all of them, or
    1 where ``F1.3`` does not fit and the shade alone shows the chunk.
    """
    room = timeline.short_block * scale - _ROOM
    for chunks in sorted({timeline.num_chunks, 1}, reverse=True):
        size = room / _longest(timeline, chunks)
        if size >= _SMALLEST:
            return min(_LARGEST, size), chunks
    return _SMALLEST, 1


def fitting_width(timelines: Sequence[Timeline], margins: float) -> int:
    """The width at which all labels fit: in a good size with their chunk or without, or else in the smallest size."""
    end = max(t.end for t in timelines)
    for size, with_chunk in ((_GOOD, True), (_GOOD, False), (_SMALLEST, False)):
        needed = (
            (_longest(t, t.num_chunks if with_chunk else 1) * size + _ROOM) / (t.short_block or end or 1.0)
            for t in timelines
        )
        width = math.ceil(margins + end * max(needed))
        if width <= _WIDEST:
            return max(width, _NARROWEST)
    return _UNLABELLED
