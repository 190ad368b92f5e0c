"""V-Half (arXiv 2405.15362, section 4 and appendix A): half of 1F1B's memory, half of its bubble.

Chunk 0 goes down the ranks at half speed and chunk 1 comes back at full speed, forwards and backwards, so that ranks
have slack where V-Min has none; floor((P+2)/2) microbatches are in memory. Warm-up and cool-down are filled greedily
(section 4.3's reordering), by the best of a few rules.
"""

from __future__ import annotations

from megatron_pp.plan.greedy import Rules
from megatron_pp.plan.orders.family import Order, Shape
from megatron_pp.plan.orders.v_pattern import Offsets, shortest

_RULES = [Rules(ahead=ahead, reserve=reserve) for ahead in (0, 2, 5) for reserve in (0, 1, 2)]


def offsets(size: int, rank: int) -> Offsets:
    pause = 3 if size % 2 == 0 else 0
    return 2 * rank, 3 * size - 2 - rank, 3 * size - 1 + pause + 2 * rank, 6 * size - 2 + pause - rank


def orders(shape: Shape) -> list[Order]:
    return shortest(shape, offsets, 2 * ((shape.pipeline_size + 2) // 2), _RULES)
