"""1F1B-V (arXiv 2405.15362, appendix): the V placement without splitting backwards. 1F1B's bubble for two thirds of
its memory.

A backward takes two slots of the pattern. Forwards pass from stage to stage without a pause; backwards pause for
three slots after every third stage, which keeps the repeated pattern from colliding with itself. floor((2P+3)/3)
microbatches are in memory.
"""

from __future__ import annotations

from megatron_pp.plan.orders.family import Order, Shape
from megatron_pp.plan.orders.v_pattern import Offsets, squeezed


def offsets(size: int, rank: int) -> Offsets:
    return rank, 2 * size - 1 - rank, _backward_slot(size, rank), _backward_slot(size, 2 * size - 1 - rank)


def _backward_slot(size: int, k: int) -> int:
    """The slot of the k-th backward, counted from the last stage."""
    first = 2 * size + (3 if size % 3 == 0 else 0)
    pauses = (k + (1 - size) % 3) // 3
    return first + 2 * k + 3 * pauses


def orders(shape: Shape) -> list[Order]:
    return squeezed(shape, offsets, split=False)
