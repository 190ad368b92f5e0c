"""Numbers that differ by the rounding of sums, compared as equals."""

ROUNDING = 1e-9


def rounded(value: float) -> float:
    """To nine digits: what differs by the rounding of sums is equal then, in any unit."""
    return float(f"{value:.9g}")
