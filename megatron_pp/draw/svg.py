"""A timeline as SVG: one file, with hover titles, light or dark by the reader's setting."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import pairwise

from megatron_pp.draw import palette
from megatron_pp.draw.columns import thinned
from megatron_pp.draw.merged import Piece, pieces
from megatron_pp.draw.palette import NAMES, OPERATIONS, block_colour, block_name, ink_on
from megatron_pp.draw.ticks import size_label, tick_label, tick_step
from megatron_pp.draw.timeline import Lane, Timeline
from megatron_pp.plan.sim.simulation import Event, Transfer

_BLOCK, _STRIP, _MEMORY, _GAP = 22, 4, 28, 10
_TOP, _MARGIN, _RIGHT = 74, 76, 12
_LETTER = 6.4  # width of a letter of the labels, in pixels
_STYLE = """
svg { background: var(--paper); --paper: #ffffff; --ink: #1a1a1a; --soft: #5f6368; --rule: #d7dadd; --idle: #f1f2f4; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #15181c; --ink: #e8eaed; --soft: #a5abb3; --rule: #3a4048; --idle: #22272d; }
}
text { font: 11px system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; }
.soft { fill: var(--soft); }
.label { text-anchor: middle; }
.end { text-anchor: end; }
.halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
"""


def render_svg(timeline: Timeline, width: int = 1400) -> str:
    """The picture, ``width`` pixels wide; blocks thinner than a pixel are added up per pixel."""
    return _Picture(timeline, width).render()


class _Picture:
    def __init__(self, timeline: Timeline, width: int) -> None:
        self.timeline = timeline
        self.width = width
        self.scale = (width - _MARGIN - _RIGHT) / (timeline.end or 1.0)
        self.named_chunks = timeline.named_chunks(self.scale, _LETTER)
        self.sent = timeline.sent()
        self.has_transfers = timeline.has_transfers
        self.most_memory = timeline.most_memory
        strips = 2 * _STRIP + 3 if self.has_transfers else 0
        self.lane_height = _BLOCK + strips + (_MEMORY + 4 if self.most_memory else 0) + _GAP
        self.height = _TOP + self.lane_height * len(timeline.lanes) + 6

    def render(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.timeline.title)}">'
        )
        body = [f"<style>{_STYLE}</style>", *self._heading(), *self._axis(), *self._lanes()]
        return "\n".join([head, *body, "</svg>", ""])

    def _heading(self) -> Iterator[str]:
        yield f'<text class="title" x="8" y="20">{escape(self.timeline.title)}</text>'
        keys = [(NAMES[op], OPERATIONS[op].hex, 12) for op in self.timeline.ops]
        if self.timeline.has_waits:
            keys.append(("waiting", palette.WAIT.hex, 4))
        if self.has_transfers:
            keys.append(("activation on its way", palette.ACTIVATION.hex, 4))
            keys.append(("gradient on its way", palette.GRADIENT.hex, 4))
        if self.most_memory:
            keys.append(("memory", palette.MEMORY.hex, 2))
        x = 8.0
        for name, colour, thick in keys:
            yield f'<rect x="{x:.0f}" y="{38 - thick / 2:.0f}" width="20" height="{thick}" fill="{colour}"/>'
            yield f'<text x="{x + 25:.0f}" y="42">{name}</text>'
            x += 40 + _LETTER * len(name)
        facts = f"bubble {self.timeline.bubble_share:.1%}"
        if self.timeline.num_chunks > 1:
            facts = f"lighter: later chunks; {facts}"
        yield f'<text class="soft" x="{x:.0f}" y="42">{facts}</text>'

    def _axis(self) -> Iterator[str]:
        end = self.timeline.end
        step = tick_step(end, (self.width - _MARGIN) // 90)
        yield f'<text class="soft" x="8" y="{_TOP - 10}">{escape(self.timeline.unit)}</text>'
        for k in range(int(end / step + 1e-9) + 1):
            x = self._x(k * step)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{self.height - 6}" stroke="var(--rule)"/>'
            yield f'<text class="soft" x="{x + 3:.1f}" y="{_TOP - 10}">{tick_label(k * step, step)}</text>'

    def _x(self, time: float) -> float:
        return _MARGIN + time * self.scale

    def _lanes(self) -> Iterator[str]:
        for k, lane in enumerate(self.timeline.lanes):
            y = _TOP + k * self.lane_height
            yield f'<text x="8" y="{y + _BLOCK / 2 + 4}">{escape(lane.name)}</text>'
            whole = self.timeline.end * self.scale
            yield f'<rect x="{_MARGIN}" y="{y}" width="{whole:.1f}" height="{_BLOCK}" fill="var(--idle)"/>'
            yield from self._strip(lane.waits, y + _BLOCK / 2 - 2, palette.WAIT.hex)
            for piece in pieces(lane.compute, self.scale):
                yield from self._piece(piece, y)
            if self.has_transfers:
                yield from self._strip(self.sent[k][0], y + _BLOCK + 2, palette.ACTIVATION.hex)
                yield from self._strip(self.sent[k][1], y + _BLOCK + 3 + _STRIP, palette.GRADIENT.hex)
            if lane.memory:
                yield from self._memory(lane, y + self.lane_height - _GAP - _MEMORY)

    def _piece(self, piece: Piece, y: float) -> Iterator[str]:
        x = _MARGIN + piece.left
        if piece.event is None:
            for op, share in piece.shares:
                height = share * _BLOCK
                yield f'<rect x="{x:.1f}" y="{y:.1f}" width="1" height="{height:.1f}" fill="{OPERATIONS[op].hex}"/>'
                y += height
            return
        at = piece.event.instruction
        colour = block_colour(at.op, at.chunk, self.timeline.num_chunks)
        width = piece.right - piece.left
        drawn = max(width - 0.7, 0.6)
        title = f"{at}: {NAMES[at.op]}, {piece.event.start:.6g} to {piece.event.end:.6g} {self.timeline.unit}"
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{drawn:.1f}" height="{_BLOCK}" fill="{colour.hex}">'
            f"<title>{escape(title)}</title></rect>"
        )
        label = block_name(at, self.named_chunks)
        if _LETTER * len(label) + 2 < width:
            middle, ink = x + width / 2, f"fill:{ink_on(colour).hex};pointer-events:none"
            yield f'<text class="label" x="{middle:.1f}" y="{y + _BLOCK / 2 + 4}" style="{ink}">{label}</text>'

    def _strip(self, things: list[Event] | list[Transfer], y: float, colour: str) -> Iterator[str]:
        """Thin bars; those that touch are drawn as one."""
        bars: list[tuple[float, float]] = []
        for thing in things:
            start = self._x(thing.start)
            end = max(start + 0.7, self._x(thing.end))
            if bars and start <= bars[-1][1] + 0.3:
                bars[-1] = (bars[-1][0], max(bars[-1][1], end))
            else:
                bars.append((start, end))
        for left, right in bars:
            yield f'<rect x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" height="{_STRIP}" fill="{colour}"/>'

    def _memory(self, lane: Lane, y: float) -> Iterator[str]:
        steps = thinned(lane.memory, 2 * self.width)
        points = [f"M{self._x(0):.1f} {y + _MEMORY}"]
        for (time, value), (until, _) in pairwise([*steps, (self.timeline.end, 0.0)]):
            height = y + _MEMORY * (1 - value / self.most_memory)
            points.append(f"L{self._x(time):.1f} {height:.1f}H{self._x(until):.1f}")
        outline, colour = "".join([*points, f"V{y + _MEMORY}Z"]), palette.MEMORY.hex
        yield f'<path d="{outline}" fill="{colour}" fill-opacity="0.25" stroke="{colour}"/>'
        peak = f"peak {size_label(lane.peak)}"
        yield f'<text class="soft end halo" x="{self.width - _RIGHT - 4}" y="{y + 8}">{peak}</text>'
