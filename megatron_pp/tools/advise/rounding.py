"""Compares numbers that differ only by the rounding of sums as equal."""

ROUNDING = 1e-9


def rounded(value: float) -> float:
    """``value`` to nine digits. Numbers that differ only by the rounding of sums are then equal, in any unit."""
    return float(f"{value:.9g}")
