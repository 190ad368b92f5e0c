"""1F1B (PipeDream-Flush; arXiv 2104.04473, section 2.2.1): P-1-r warm-up forwards, then one forward and one backward
in turn, then the backwards that are left. Rank r holds at most P - r microbatches.

``warmup_then_steady`` is shared with every family that is a warm-up followed by strict alternation.
"""

from __future__ import annotations

from megatron_pp.plan.orders.family import Order, Shape, b, f


def warmup_then_steady(forwards: Order, backwards: Order, warmup: int) -> Order:
    """``warmup`` forwards, then a forward and a backward in turn until the forwards are used up, then the remaining
    backwards.
    """
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - warmup :]


def orders(shape: Shape) -> list[Order]:
    mbs = range(shape.num_microbatches)
    forwards, backwards = [f(0, m) for m in mbs], [b(0, m) for m in mbs]
    return [warmup_then_steady(forwards, backwards, shape.pipeline_size - 1 - r) for r in range(shape.pipeline_size)]
