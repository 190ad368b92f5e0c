"""The schedule families. Each gives compute order only; ``megatron_pp.plan.lower`` adds the communication."""

from __future__ import annotations

from megatron_pp.plan.family import Family, Order, Shape
from megatron_pp.plan.orders import auto, dualpipe_v, loop, v, zero_bubble
from megatron_pp.plan.orders.dualpipe_v import DUALPIPE_V
from megatron_pp.plan.orders.loop import BREADTH_FIRST, EAGER_1F1B, GPIPE, INTERLEAVED, ONE_F_ONE_B
from megatron_pp.plan.orders.v import ONE_F_ONE_B_V, V_HALF, V_MIN, ZB_V
from megatron_pp.plan.orders.zero_bubble import INTERLEAVED_ZB, ZB_H1, ZB_H2
from megatron_pp.plan.placement import LOOP, V_SHAPE

AUTO = "auto"
AUTO_V = "auto_v"

_LOOP_FAMILIES = loop.FAMILIES + zero_bubble.FAMILIES
_V_FAMILIES = v.FAMILIES + dualpipe_v.FAMILIES
_SEARCHING_FAMILIES = (
    auto.searching_family(AUTO, _LOOP_FAMILIES, LOOP, chunks=None),
    auto.searching_family(AUTO_V, _V_FAMILIES, V_SHAPE, chunks=2),
)

SCHEDULES: dict[str, Family] = {family.name: family for family in _LOOP_FAMILIES + _V_FAMILIES + _SEARCHING_FAMILIES}

OLD_NAMES = {"dualpipev": DUALPIPE_V}
"""Spellings of earlier releases, still read."""

__all__ = [
    "AUTO",
    "AUTO_V",
    "BREADTH_FIRST",
    "DUALPIPE_V",
    "EAGER_1F1B",
    "GPIPE",
    "INTERLEAVED",
    "INTERLEAVED_ZB",
    "OLD_NAMES",
    "ONE_F_ONE_B",
    "ONE_F_ONE_B_V",
    "SCHEDULES",
    "V_HALF",
    "V_MIN",
    "ZB_H1",
    "ZB_H2",
    "ZB_V",
    "Family",
    "Order",
    "Shape",
]
