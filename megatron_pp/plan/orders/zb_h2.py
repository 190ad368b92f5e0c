"""ZB-H2 (arXiv 2401.10241, section 2.2): no bubble within a rank's own span, for about twice the memory of 1F1B.

Rank r warms up with 2 (P-r) - 1 forwards, so that it has work until the first gradient comes back, and keeps 2 r
weight gradients for the end, so that it has work until the last rank is done. At most 2 P - 1 microbatches in memory,
on every rank; the first P-1 forwards' delay remains in the makespan.
"""

from __future__ import annotations

from megatron_pp.plan.orders.family import Order, Shape, b, f, w


def orders(shape: Shape) -> list[Order]:
    return [_order(shape.pipeline_size, shape.num_microbatches, rank) for rank in range(shape.pipeline_size)]


def _order(size: int, microbatches: int, rank: int) -> Order:
    forwards = [f(0, m) for m in range(microbatches)]
    weights = [w(0, m) for m in range(microbatches)]
    warmup = min(2 * (size - rank) - 1, microbatches)
    order, forwards = forwards[:warmup], forwards[warmup:]
    for done in range(microbatches):
        order.append(b(0, done))
        if done >= 2 * rank:
            order.append(weights.pop(0))
        if forwards:
            order.append(forwards.pop(0))
    return order + weights
