"""GPipe: all forwards, then all backwards (arXiv 1811.06965, section 2.3). The simplest order and the largest memory:
M microbatches.

Only the order within a rank differs from the paper's figure: backwards run in the order of the forwards, so that
gradients are added up in the same order as under 1F1B and are equal to the last bit. With several chunks a rank the
same idea is called breadth-first.
"""

from __future__ import annotations

from megatron_pp.plan.orders.family import Order, Shape, b, f


def orders(shape: Shape) -> list[Order]:
    mbs = range(shape.num_microbatches)
    return [[f(0, m) for m in mbs] + [b(0, m) for m in mbs] for _ in range(shape.pipeline_size)]
