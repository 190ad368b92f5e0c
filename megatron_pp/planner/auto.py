"""``auto`` and ``auto_v``: the best plan that ``megatron_pp.planner.plan_search`` finds for measured times and a memory
limit.

One family for each placement, since the placement decides which layers a rank builds, long before a plan is made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_pp.plan.ir.placement import LOOP, V_SHAPE
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Announce, Family, Order, Shape
from megatron_pp.planner.plan_search import SearchResult, search


@dataclass(frozen=True)
class AutoOrders:
    """Searches among ``families`` and what grows out of them, on one placement."""

    name: str
    families: tuple[Family, ...]
    placement: str

    def result(
        self, spec: PlanSpec, announce: Announce | None = None, allowed: Callable[[Plan], bool] | None = None
    ) -> SearchResult:
        return search(spec, self.families, self.placement, announce, allowed)

    def of_spec(
        self, spec: PlanSpec, announce: Announce | None = None, allowed: Callable[[Plan], bool] | None = None
    ) -> Plan:
        return self.result(spec, announce, allowed).best.plan

    def of_shape(self, shape: Shape) -> list[Order]:
        """Without measured values."""
        sizes = shape.pipeline_size, shape.num_chunks, shape.num_microbatches, shape.group_size
        return [list(order) for order in self.of_spec(PlanSpec(self.name, *sizes)).orders]


def searching_family(name: str, families: Sequence[Family], placement: str, chunks: int | None) -> Family:
    orders = AutoOrders(name, tuple(families), placement)
    return Family(
        name,
        orders.of_shape,
        "greedy search in the manner of arXiv 2401.10241, section 3.1",
        f"the best that a search finds for measured times and a memory limit; {placement} placement",
        placement,
        chunks,
        splits_weight=True,
        search=orders.of_spec,
        grouped=any(family.grouped for family in families),
    )


def _named(*names: str) -> tuple[Family, ...]:
    return tuple(SCHEDULES[name] for name in names)


_ON_LOOP = _named(
    *("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "gis", "gis_h", "combined_1f1b", "breadth_first", "zb_h1"),
    *("zb_h2", "interleaved_zb", "pipe_offload"),
)
_ON_V = _named("zb_v", "v_half", "v_min", "1f1b_v", "dualpipe_v")

FAMILIES = (
    searching_family("auto", _ON_LOOP, LOOP, chunks=None),
    searching_family("auto_v", _ON_V, V_SHAPE, chunks=2),
)
