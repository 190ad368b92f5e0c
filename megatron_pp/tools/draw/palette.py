"""Colours and names of blocks, the same in every style.

The colours are the palette of Okabe and Ito (https://jfly.uni-koeln.de/color/). Colour-blind readers can tell them
apart, on light and on dark paper. Chunks are shades of their operation's colour.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, INPUT_GRAD, PASSES, WEIGHT_GRAD, Instruction


class Colour(NamedTuple):
    """Red, green and blue, 0 to 255."""

    red: int
    green: int
    blue: int

    @property
    def hex(self) -> str:
        return f"#{self.red:02x}{self.green:02x}{self.blue:02x}"

    def mixed(self, other: Colour, share: float) -> Colour:
        """This colour with ``share`` (0 to 1) of another one."""
        return Colour(*(round(a + (b - a) * share) for a, b in zip(self, other, strict=True)))

    @property
    def luminance(self) -> float:
        """Relative luminance as WCAG 2 defines it, 0 to 1."""
        parts = [c / 255 for c in self]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(self, other: Colour) -> float:
        """Contrast ratio as WCAG 2 defines it, 1 to 21."""
        lighter, darker = sorted((self.luminance, other.luminance), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)


WHITE = Colour(255, 255, 255)
BLACK = Colour(0, 0, 0)
# Each operation has a colour (blue, orange, yellow, green, violet, red), a name, and a style for terminals of 16
# colours. Two colours differ from the palette of Okabe and Ito. The yellow is greener, because deuteranopes see theirs
# close to the orange. The bluish green is lighter, because tritanopes see theirs close to the blue.
_PASSES = (
    (Colour(144, 0, 240), "output layer, logits", "black on magenta"),
    (Colour(192, 48, 48), "output layer, weight gradient", "black on cyan"),
)
_BLOCKS = {
    FORWARD: (Colour(0, 114, 178), "forward", "white on blue"),
    BACKWARD: (Colour(230, 159, 0), "backward", "white on red"),
    INPUT_GRAD: (Colour(240, 250, 70), "input gradients", "black on yellow"),
    WEIGHT_GRAD: (Colour(40, 196, 150), "weight gradients", "black on green"),
    **dict(zip(PASSES, _PASSES, strict=False)),
}
OPERATIONS = {op: colour for op, (colour, _, _) in _BLOCKS.items()}
NAMES = {op: name for op, (_, name, _) in _BLOCKS.items()}
_IN_16_COLOURS = {op: style for op, (_, _, style) in _BLOCKS.items()}
_LIGHTEST_CHUNK = 0.55


class Theme(NamedTuple):
    """The colours of a picture, except those of its blocks."""

    paper: Colour
    ink: Colour  # text
    soft: Colour  # secondary text
    rule: Colour  # lines
    idle: Colour  # a rank that does nothing
    wait: Colour  # a rank in a WAIT or FREE
    activation: Colour  # transfers
    gradient: Colour
    offload: Colour  # copies to host memory, and back
    load: Colour
    gather: Colour  # collectives of data-parallel replicas
    scatter: Colour
    memory: Colour  # the memory curve; ranks that share a chart go from ``memory`` to ``memory_last``
    memory_last: Colour


_THEMES = {  # on light and on dark paper
    "paper": (WHITE, Colour(21, 24, 28)),
    "ink": (Colour(26, 26, 26), Colour(232, 234, 237)),
    "soft": (Colour(95, 99, 104), Colour(165, 171, 179)),
    "rule": (Colour(215, 218, 221), Colour(58, 64, 72)),
    "idle": (Colour(241, 242, 244), Colour(34, 39, 45)),
    "wait": (Colour(160, 165, 173), Colour(110, 117, 126)),
    "activation": (Colour(42, 143, 196), Colour(86, 180, 233)),  # the palette's sky blue; darker on light paper
    "gradient": (Colour(213, 94, 0), Colour(255, 138, 61)),  # vermillion
    "offload": (Colour(0, 90, 70), Colour(0, 158, 115)),  # the palette's bluish green, darker and lighter
    "load": (Colour(0, 158, 115), Colour(110, 225, 190)),
    "gather": (Colour(0, 90, 70), Colour(0, 158, 115)),  # the colours of copies: no picture has both
    "scatter": (Colour(0, 158, 115), Colour(110, 225, 190)),
    "memory": (Colour(80, 15, 70), Colour(250, 215, 235)),  # the palette's reddish purple, darker and lighter
    "memory_last": (Colour(236, 150, 200), Colour(165, 60, 125)),
}
LIGHT, DARK = (Theme(**{name: colours[k] for name, colours in _THEMES.items()}) for k in (0, 1))


def block_colour(op: str, chunk: int, num_chunks: int) -> Colour:
    """The colour of a compute block: chunk 0 has the operation's full colour, later chunks are lighter."""
    share = _LIGHTEST_CHUNK * chunk / max(1, num_chunks - 1) if num_chunks > 1 else 0.0
    return OPERATIONS[op].mixed(WHITE, share)


def colour_style(op: str, colour: Colour, few_colours: bool) -> str:
    """The style of a block of ``op`` in the terminal. ``few_colours``: the terminal has 8 or 16 colours, and chunks
    have no shades."""
    return _IN_16_COLOURS[op] if few_colours else f"{ink_on(colour).hex} on {colour.hex}"


def block_name(at: Instruction, num_chunks: int) -> str:
    """The name of a block: ``F3`` is microbatch 3; with several chunks, ``F1.3`` is microbatch 3 of chunk 1; ``F3s2``
    is slice 2 of microbatch 3."""
    part = f"s{at.part}" if at.part >= 0 else ""
    return f"{at.op}{at.mb}{part}" if num_chunks == 1 else f"{at.op}{at.chunk}.{at.mb}{part}"


def ink_on(colour: Colour) -> Colour:
    """Black or white, whichever reads better on ``colour``."""
    return max((BLACK, WHITE), key=colour.contrast)
