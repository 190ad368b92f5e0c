"""The naive schedule: one microbatch through the whole pipeline, forward and back, before the next one starts.

Not for training, where every rank but one would always be idle; it is what the other schedules are measured against.
"""

from __future__ import annotations

from megatron_pp.errors import PlanError
from megatron_pp.plan.family import Order, Shape, b, f
from megatron_pp.plan.lower import lowered
from megatron_pp.plan.placement import LOOP, Placement
from megatron_pp.plan.spec import Plan, PlanSpec

NAIVE = "naive"


def naive_orders(shape: Shape) -> list[Order]:
    """On every rank: F0 B0 F1 B1 ..."""
    mbs = range(shape.num_microbatches)
    return [[op for m in mbs for op in (f(0, m), b(0, m))] for _ in range(shape.pipeline_size)]


def naive_plan(spec: PlanSpec) -> Plan:
    """The lowered plan. Raises PlanError unless ``spec`` has one chunk a rank."""
    if spec.num_chunks != 1:
        raise PlanError(f"the naive schedule has 1 model chunk a rank, not {spec.num_chunks}")
    placement = Placement(LOOP, spec.pipeline_size, 1)
    orders = naive_orders(Shape(spec.pipeline_size, 1, spec.num_microbatches, spec.num_microbatches))
    return lowered(spec, placement, orders)
