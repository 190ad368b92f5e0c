"""V-Min (arXiv 2405.15362, section 4 and appendix A): a third of 1F1B's memory, two thirds of its bubble.

Forwards and backwards follow each other without a pause over all 2P stages, the shortest life a microbatch can have:
floor((P+4)/3) of them are in memory. The pause of two slots at the turn where P is a multiple of 3 keeps the repeated
pattern from colliding with itself.
"""

from __future__ import annotations

from megatron_pp.plan.orders.family import Order, Shape
from megatron_pp.plan.orders.v_pattern import Offsets, squeezed


def offsets(size: int, rank: int) -> Offsets:
    pause = 2 if size % 3 == 0 else 0
    return rank, 2 * size - 1 - rank, 2 * size + pause + rank, 4 * size + pause - 1 - rank


def orders(shape: Shape) -> list[Order]:
    return squeezed(shape, offsets, split=True)
