"""Breadth-first (arXiv 2211.05953, section 4): every chunk runs all its microbatches before the next chunk starts,
backwards likewise in reverse. Largest memory (V M chunks), but each chunk's parameters and gradients are touched in
one stretch, which suits sharded data parallelism.
"""

from __future__ import annotations

from megatron_pp.plan.orders.family import Order, Shape, b, f


def orders(shape: Shape) -> list[Order]:
    chunks, mbs = range(shape.num_chunks), range(shape.num_microbatches)
    order = [f(c, m) for c in chunks for m in mbs] + [b(c, m) for c in reversed(chunks) for m in mbs]
    return [list(order) for _ in range(shape.pipeline_size)]
