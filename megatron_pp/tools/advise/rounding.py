"""Rounds numbers so that those which differ only by the rounding of sums become equal."""

ROUNDING = 1e-9


def rounded(value: float) -> float:
    """``value`` rounded to nine digits. Numbers that differ only by the rounding of sums become equal, in any unit."""
    return float(f"{value:.9g}")
