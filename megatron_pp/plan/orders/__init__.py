"""The schedule families. Each gives compute order only; ``megatron_pp.plan.lower`` adds the communication."""

from __future__ import annotations

from megatron_pp.plan.orders import (
    auto,
    breadth_first,
    dualpipe_v,
    eager_1f1b,
    gpipe,
    interleaved,
    interleaved_zb,
    one_f_one_b,
    one_f_one_b_v,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from megatron_pp.plan.orders.family import Family, Order, Shape
from megatron_pp.plan.placement import LOOP, V_SHAPE

GPIPE = "gpipe"
ONE_F_ONE_B = "1f1b"
EAGER_1F1B = "eager_1f1b"
INTERLEAVED = "interleaved_1f1b"
BREADTH_FIRST = "breadth_first"
ZB_H1 = "zb_h1"
ZB_H2 = "zb_h2"
INTERLEAVED_ZB = "interleaved_zb"
ZB_V = "zb_v"
V_HALF = "v_half"
V_MIN = "v_min"
ONE_F_ONE_B_V = "1f1b_v"
DUALPIPE_V = "dualpipev"
AUTO = "auto"
AUTO_V = "auto_v"

_LOOP_FAMILIES = (
    Family(
        GPIPE,
        gpipe.orders,
        source="arXiv 1811.06965, section 2.3",
        summary="all forwards, then all backwards; M microbatches in memory",
        chunks=1,
    ),
    Family(
        ONE_F_ONE_B,
        one_f_one_b.orders,
        source="arXiv 2104.04473, section 2.2.1",
        summary="P-1-r warm-up forwards, then one forward, one backward; P-r microbatches in memory",
        chunks=1,
    ),
    Family(
        EAGER_1F1B,
        eager_1f1b.orders,
        source="arXiv 2211.05322, section 5",
        summary="1F1B with twice the warm-up: hides transfers that 1F1B waits for; 2 (P-r) - 1 microbatches in memory",
        chunks=1,
    ),
    Family(
        INTERLEAVED,
        interleaved.orders,
        source="arXiv 2104.04473, section 2.2.2",
        summary="V chunks a rank take turns; bubble 1/V of 1F1B's for V times its transfers",
    ),
    Family(
        BREADTH_FIRST,
        breadth_first.orders,
        source="arXiv 2211.05953, section 4",
        summary="every chunk runs all its microbatches in one stretch; V M chunks in memory",
    ),
    Family(
        ZB_H1,
        zb_h1.orders,
        source="arXiv 2401.10241, section 2.1",
        summary="1F1B with weight gradients in its bubble: (P-1)(F+B-W) is left; P microbatches in memory",
        chunks=1,
        splits_weight=True,
    ),
    Family(
        ZB_H2,
        zb_h2.orders,
        source="arXiv 2401.10241, section 2.2",
        summary="no bubble within a rank's span; 2P-1 microbatches in memory",
        chunks=1,
        splits_weight=True,
    ),
    Family(
        INTERLEAVED_ZB,
        interleaved_zb.orders,
        source="arXiv 2104.04473, section 2.2.2, with the split of arXiv 2401.10241",
        summary="interleaved 1F1B with weight gradients in its bubble, at the same memory",
        splits_weight=True,
    ),
)

_V_FAMILIES = (
    Family(
        ZB_V,
        zb_v.orders,
        source="arXiv 2401.10241, section 6",
        summary="no bubble within a rank's span for 1F1B's memory; V placement",
        placement=V_SHAPE,
        chunks=2,
        splits_weight=True,
    ),
    Family(
        V_HALF,
        v_half.orders,
        source="arXiv 2405.15362, section 4",
        summary="half of 1F1B's memory and bubble; V placement",
        placement=V_SHAPE,
        chunks=2,
        splits_weight=True,
    ),
    Family(
        V_MIN,
        v_min.orders,
        source="arXiv 2405.15362, section 4",
        summary="a third of 1F1B's memory, two thirds of its bubble; V placement",
        placement=V_SHAPE,
        chunks=2,
        splits_weight=True,
    ),
    Family(
        ONE_F_ONE_B_V,
        one_f_one_b_v.orders,
        source="arXiv 2405.15362, appendix",
        summary="1F1B's bubble for two thirds of its memory, backwards unsplit; V placement",
        placement=V_SHAPE,
        chunks=2,
    ),
    Family(
        DUALPIPE_V,
        dualpipe_v.orders,
        source="arXiv 2412.19437, section 3.2.1",
        summary="forwards paired with full backwards, one's communication behind the other's compute; V placement",
        placement=V_SHAPE,
        chunks=2,
        splits_weight=True,
        remark=dualpipe_v.remark,
    ),
)

_SEARCHING_FAMILIES = (
    auto.searching_family(AUTO, _LOOP_FAMILIES, LOOP, chunks=None),
    auto.searching_family(AUTO_V, _V_FAMILIES, V_SHAPE, chunks=2),
)

SCHEDULES: dict[str, Family] = {family.name: family for family in _LOOP_FAMILIES + _V_FAMILIES + _SEARCHING_FAMILIES}

__all__ = [
    "AUTO",
    "AUTO_V",
    "BREADTH_FIRST",
    "DUALPIPE_V",
    "EAGER_1F1B",
    "GPIPE",
    "INTERLEAVED",
    "INTERLEAVED_ZB",
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
