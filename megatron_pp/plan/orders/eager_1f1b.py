"""Eager 1F1B (arXiv 2211.05322, section 5): rank r runs 2 (P-1-r) + 1 forwards before its first backward, where 1F1B
runs P - r.

Plain 1F1B has just enough microbatches between two neighbouring ranks to keep them busy when transfers take no time,
so that each transfer of the steady state is waited for. Nearly twice as many hide transfers of up to half a forward
and backward; at most 2 (P-r) - 1 microbatches are in memory.
"""

from __future__ import annotations

from megatron_pp.plan.orders.family import Order, Shape, b, f
from megatron_pp.plan.orders.one_f_one_b import warmup_then_steady


def orders(shape: Shape) -> list[Order]:
    mbs = range(shape.num_microbatches)
    forwards, backwards = [f(0, m) for m in mbs], [b(0, m) for m in mbs]
    # The first of the steady forwards counts: every rank then runs one forward more than its warm-up before a backward.
    return [
        warmup_then_steady(forwards, backwards, 2 * (shape.pipeline_size - 1 - r)) for r in range(shape.pipeline_size)
    ]
