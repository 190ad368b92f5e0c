"""An HTML page about a comparison: the verdict, and a map of layers x ranks coloured by error."""

from __future__ import annotations

import re
from html import escape
from math import log10

from megatron_pp.errors import visible
from megatron_pp.tools.parity.answers.answer import Answer
from megatron_pp.tools.parity.answers.comparison import Comparison, Difference
from megatron_pp.tools.parity.records.recorder import BUFFER, LOGGED, PARAMETER, is_state

_REDS = ((244, 192), (184, 32), (168, 14))  # red, green and blue, each for a small error and for a large error
_CELL = 34
_LEFT = 210
_TOP = 46
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>megatron-pp parity</title>
<style>body {{ font: 14px system-ui, sans-serif; margin: 2em; max-width: 70em }} pre {{ white-space: pre-wrap }}</style>
<h1>{verdict}</h1>
{picture}
<pre>{lines}</pre>
</html>
"""


def text_of(answer: Answer) -> str:
    lines = [visible(line) for line in answer.lines()]
    return _PAGE.format(verdict=escape(lines[0]), picture=picture_of(answer), lines=escape("\n".join(lines[1:])))


def picture_of(answer: Answer) -> str:
    """The map as SVG. A cell is green if the error of its layer on its rank is within rounding; otherwise it is redder
    for larger errors."""
    worst = _worst(_causes(answer.comparison))
    layers = list(dict.fromkeys(layer for layer, _ in worst))
    ranks = range(max((rank for _, rank in worst), default=-1) + 1)
    width = _LEFT + _CELL * max(len(ranks), 4) + 20
    height = _TOP + 20 * len(layers) + 40
    parts = [_text(_LEFT, 16, f"{answer.smallest.layout.label() if answer.smallest else answer.layout.label()}")]
    for rank in ranks:
        parts.append(_text(_LEFT + rank * _CELL + 4, _TOP - 8, f"r{rank}"))
    for row, layer in enumerate(layers):
        parts.append(_text(8, _TOP + 20 * row + 14, layer))
        for rank in ranks:
            if (layer, rank) in worst:
                parts.append(_cell(rank, row, layer, worst[layer, rank]))
    parts.append(_text(8, height - 12, "largest error / what rounding allows: green below 1, red to 1,000,000"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 520)}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" style="background:#fff">\n{body}\n</svg>'
    )


def _causes(comparison: Comparison) -> list[Difference]:
    """The differences of the first step that differs. Values after the gradients are included only if all gradients are
    right."""
    first = comparison.first
    step, after = (first.key.step, _after_gradients(first.key.kind)) if first else (0, False)
    return [
        one for one in comparison.differences if one.key.step == step and (after or not _after_gradients(one.key.kind))
    ]


def _after_gradients(kind: str) -> bool:
    return kind in (PARAMETER, BUFFER, LOGGED) or is_state(kind)


def _worst(differences: list[Difference]) -> dict[tuple[str, int], float]:
    """(layer, rank) -> the largest error, divided by the allowed error."""
    worst: dict[tuple[str, int], float] = {}
    for one in differences:
        place = (_layer(one.key.name), one.rank)
        relative = one.error / one.allowed if one.allowed else (0.0 if not one.error else float("inf"))
        worst[place] = max(worst.get(place, 0.0), relative)
    return worst


def _layer(name: str) -> str:
    found = re.match(r".*?\blayers\.\d+", name)
    return found[0] if found else name.split(".")[0]


def _cell(rank: int, row: int, layer: str, error: float) -> str:
    bad = min(1.0, log10(min(max(error, 1.0), 1e6)) / 6)
    colour = (
        "#b7e1c0"
        if error <= 1
        else "#" + "".join(f"{round(light + bad * (dark - light)):02x}" for light, dark in _REDS)
    )
    place = f'x="{_LEFT + rank * _CELL}" y="{_TOP + 20 * row}" width="{_CELL - 3}" height="17"'
    return f'<rect {place} fill="{colour}"><title>{escape(layer)}, rank {rank}: {error:.3g}</title></rect>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'
