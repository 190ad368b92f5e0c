"""Interleaved zero bubble: ZB-H1's idea on the interleaved order.

The order of forwards and backwards is interleaved 1F1B's (arXiv 2104.04473, section 2.2.2); rank r runs each weight
gradient r backwards late (arXiv 2401.10241, section 2.1, on virtual microbatches). Bubble (P-1)(f+b-w) of one chunk's
times, for interleaved 1F1B's memory.
"""

from __future__ import annotations

from megatron_pp.plan.orders import interleaved
from megatron_pp.plan.orders.family import Order, Shape
from megatron_pp.plan.orders.zb_h1 import delay_weights


def orders(shape: Shape) -> list[Order]:
    return [delay_weights(order, delay=rank) for rank, order in enumerate(interleaved.orders(shape))]
