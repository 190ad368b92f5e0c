"""The nearest legal numbers, which error messages name. Never imports torch."""

import itertools
from collections.abc import Callable


def nearest(value: int, works: Callable[[int], bool]) -> tuple[int, ...]:
    """The closest numbers below and above ``value`` for which ``works`` is true, from 1 on. One above must exist."""
    below = next((n for n in range(value - 1, 0, -1) if works(n)), None)
    above = next(n for n in itertools.count(value + 1) if works(n))
    return (above,) if below is None else (below, above)


def nearest_multiples(value: int, of: int) -> str:
    """The closest multiples of ``of`` around ``value``, in words: ``28 or 32``. ``value`` is not a multiple itself."""
    below = value // of * of
    return f"{below} or {below + of}" if below > 0 else str(below + of)
