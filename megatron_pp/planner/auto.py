"""``auto`` and ``auto_v``: the best plan that ``search`` finds for measured times and a memory limit. There is one
family for each placement, because the placement decides which layers a rank builds, long before a plan is made.
"""

from functools import partial

from megatron_pp.plan.ir.placement import LOOP, V_SHAPE
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Announce, Family, Order, Shape
from megatron_pp.planner.plan_search import SearchResult, search

_ON_LOOP = (
    *("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "gis", "gis_h", "combined_1f1b", "breadth_first", "zb_h1"),
    *("zb_h2", "interleaved_zb", "pipe_offload"),
)
_ON_V = ("zb_v", "v_half", "v_min", "1f1b_v", "dualpipe_v")
_AMONG = {"auto": (_ON_LOOP, LOOP), "auto_v": (_ON_V, V_SHAPE)}


def found(spec: PlanSpec, announce: Announce | None = None) -> SearchResult:
    """The result of the search of ``spec.schedule``. Arguments and errors are those of ``search``."""
    names, placement = _AMONG[spec.schedule]
    return search(spec, [SCHEDULES[name] for name in names if name in SCHEDULES], placement, announce)


def _plan(spec: PlanSpec, announce: Announce | None = None) -> Plan:
    return found(spec, announce).best.plan


def _orders(name: str, shape: Shape) -> list[Order]:
    """The orders of a search without measured values."""
    spec = PlanSpec(name, shape.pipeline_size, shape.num_chunks, shape.num_microbatches, shape.group_size)
    return [list(order) for order in _plan(spec).orders]


def _family(name: str, chunks: int | None) -> Family:
    names, placement = _AMONG[name]
    return Family(
        name,
        partial(_orders, name),
        "greedy search in the manner of arXiv 2401.10241, section 3.1",
        f"the best that a search finds for measured times and a memory limit; {placement} placement",
        placement,
        chunks,
        splits_weight=True,
        search=_plan,
        grouped=any(SCHEDULES[one].grouped for one in names),
    )


FAMILIES = (_family("auto", chunks=None), _family("auto_v", chunks=2))
