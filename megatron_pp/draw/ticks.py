"""Numbers for axes and tables."""

from __future__ import annotations

import math

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def tick_step(span: float, most: int) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that gives no more than ``most`` steps over ``span``."""
    if span <= 0:
        return 1.0
    raw = span / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))


def tick_label(value: float, step: float) -> str:
    """``value`` with as many decimals as ``step`` needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}"


def size_label(value: float) -> str:
    """Bytes in the unit that keeps the number short."""
    for unit, size in _UNITS:
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def value_ticks(most: float, in_bytes: bool) -> list[tuple[float, str]]:
    """Round values from 0 to ``most``, with their labels."""
    one = next((size for _, size in _UNITS if most >= size), 1) if in_bytes else 1
    step = tick_step(most / one, 4)
    values = [k * step for k in range(int(most / one / step + 1e-9) + 1)]
    labels = [size_label(value * one) if in_bytes else tick_label(value, step) for value in values]
    return [(value * one, label) for value, label in zip(values, labels, strict=True)]


def short(value: float) -> str:
    """Three digits, or all before the decimal point."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}" if abs(value) < 10_000 else f"{value:.0f}"


def percent(share: float) -> str:
    """A share with one decimal."""
    return f"{share:.1%}"
