"""The schedule families. Each gives compute order only; ``megatron_pp.plan.lower`` adds the communication."""

from __future__ import annotations

from megatron_pp.plan.orders import breadth_first, gpipe, interleaved, one_f_one_b
from megatron_pp.plan.orders.family import Family, Order, Shape

GPIPE = "gpipe"
ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved_1f1b"
BREADTH_FIRST = "breadth_first"

SCHEDULES: dict[str, Family] = {
    family.name: family
    for family in (
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
    )
}

__all__ = ["BREADTH_FIRST", "GPIPE", "INTERLEAVED", "ONE_F_ONE_B", "SCHEDULES", "Family", "Order", "Shape"]
