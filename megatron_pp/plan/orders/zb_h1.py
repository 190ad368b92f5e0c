"""ZB-H1 (arXiv 2401.10241, section 2.1): 1F1B with the weight gradients taken out of the backwards.

Rank r runs the weight gradient of microbatch i - r right after the backward of i, and the last r at the end, where
1F1B has its bubble. Backwards reach the next rank earlier by one W: the bubble is (P-1)(F+B-W). Every rank holds P
microbatches, what 1F1B's first rank holds.
"""

from __future__ import annotations

from megatron_pp.plan.instruction import BACKWARD
from megatron_pp.plan.orders import one_f_one_b
from megatron_pp.plan.orders.family import Order, Shape, w


def orders(shape: Shape) -> list[Order]:
    return [delay_weights(order, delay=rank) for rank, order in enumerate(one_f_one_b.orders(shape))]


def delay_weights(order: Order, delay: int) -> Order:
    """Split every backward of ``order``: each weight gradient runs right after the backward ``delay`` places later,
    the last ones at the end.
    """
    result: Order = []
    waiting: Order = []
    for op in order:
        result.append(op)
        if op.op == BACKWARD:
            waiting.append(w(op.chunk, op.mb))
            if len(waiting) > delay:
                result.append(waiting.pop(0))
    return result + waiting
