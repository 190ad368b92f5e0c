"""The nearest numbers that are right, for errors that name them. Never imports torch."""

import itertools
from collections.abc import Callable


def nearest(value: int, works: Callable[[int], bool]) -> tuple[int, ...]:
    """The closest numbers of at least 1 below and above ``value`` that work; some number above must."""
    below = next((n for n in range(value - 1, 0, -1) if works(n)), None)
    above = next(n for n in itertools.count(value + 1) if works(n))
    return (above,) if below is None else (below, above)


def nearest_multiples(value: int, of: int) -> str:
    """The closest multiples of ``of`` around ``value``, which is none, in words: ``28 or 32``."""
    below = value // of * of
    return f"{below} or {below + of}" if below > 0 else str(below + of)
