"""Colours that colour-blind readers can tell apart, on light and on dark paper: the palette of Okabe and Ito
(https://jfly.uni-koeln.de/color/). Chunks are shades of their operation's colour.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_pp.plan.instruction import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD


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
OPERATIONS = {
    FORWARD: Colour(0, 114, 178),  # blue
    BACKWARD: Colour(230, 159, 0),  # orange
    INPUT_GRAD: Colour(240, 250, 70),  # their yellow, greener: theirs is close to the orange for deuteranopes
    WEIGHT_GRAD: Colour(40, 196, 150),  # their bluish green, lighter: theirs is close to the blue for tritanopes
}
NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRAD: "input gradients",
    WEIGHT_GRAD: "weight gradients",
}
ACTIVATION = Colour(86, 180, 233)  # sky blue: transfers of activations
GRADIENT = Colour(213, 94, 0)  # vermillion: transfers of gradients
WAIT = Colour(204, 121, 167)  # reddish purple: a rank stands in a WAIT or FREE
MEMORY = Colour(204, 121, 167)
_LIGHTEST_CHUNK = 0.55


def block_colour(op: str, chunk: int, num_chunks: int) -> Colour:
    """The colour of a compute block: chunk 0 in full, later chunks lighter."""
    share = _LIGHTEST_CHUNK * chunk / max(1, num_chunks - 1) if num_chunks > 1 else 0.0
    return OPERATIONS[op].mixed(WHITE, share)


def ink_on(colour: Colour) -> Colour:
    """Black or white, whichever reads better on ``colour``."""
    return max((BLACK, WHITE), key=colour.contrast)
