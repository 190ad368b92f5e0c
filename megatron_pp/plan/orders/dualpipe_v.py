"""DualPipeV (DeepSeek-V3's DualPipe, arXiv 2412.19437, section 3.2.1, folded onto the V placement, "cut-in-half" as
its authors call it).

Eight phases; in the fourth and fifth a forward stands next to the full backward of another microbatch, made for
running the two together (``overlapped_forward_backward``), so that one's communication hides behind the other's
compute. Weight gradients are split off only where they fill bubbles. 2P + 1 chunks are in memory. The phases need M
>= 2P; below, ZB-V's order stands in, which has the same placement.
"""

from __future__ import annotations

from megatron_pp.plan.family import Family, Order, Shape
from megatron_pp.plan.orders.phases import PhaseWriter
from megatron_pp.plan.orders.v import zb_v
from megatron_pp.plan.placement import V_SHAPE

DUALPIPE_V = "dualpipe_v"


def dualpipe_v(shape: Shape) -> list[Order]:
    size, microbatches = shape.pipeline_size, shape.num_microbatches
    if microbatches < 2 * size:
        return zb_v(shape)
    return [_in_phases(size, microbatches, rank) for rank in range(size)]


def remark(shape: Shape) -> str:
    """Says so where the phases do not fit and another order stands in; empty where they do."""
    least = 2 * shape.pipeline_size
    if shape.num_microbatches >= least:
        return ""
    return (
        f"DualPipeV needs at least 2 P = {least} microbatches and there are {shape.num_microbatches}: "
        "ZB-V's order, on the same placement, is used instead"
    )


def _in_phases(size: int, microbatches: int, rank: int) -> Order:
    rank_order = PhaseWriter()
    behind = size - 1 - rank  # ranks between this one and the turn of the V
    _warm_up(rank_order, behind, rank)
    for _ in range(microbatches - 2 * size + rank + 1):
        rank_order.forward(0)
        rank_order.backward(1)
        rank_order.forward(1)
        rank_order.backward(0)
    for _ in range(behind):
        rank_order.backward(1)
        rank_order.forward(1)
        rank_order.backward(0)
    _cool_down(rank_order, behind, rank)
    return rank_order.order


def _warm_up(rank_order: PhaseWriter, behind: int, rank: int) -> None:
    for _ in range(2 * behind):
        rank_order.forward(0)
    for _ in range(rank + 1):
        rank_order.forward(0)
        rank_order.forward(1)
    for _ in range(behind):
        rank_order.backward(1, split=True)
        rank_order.weight()
        rank_order.forward(1)


def _cool_down(rank_order: PhaseWriter, behind: int, rank: int) -> None:
    """The last backwards; the second half of them are split, to have weight gradients for the waits that follow."""
    full = rank + 1  # of 2 (rank + 1) backwards, chunk 1 and chunk 0 in turn
    for k in range(2 * (rank + 1)):
        rank_order.backward(1 - k % 2, split=k >= full)
    for _ in range(behind):
        rank_order.weight()
        rank_order.backward(0, split=True)
    rank_order.all_weights()


FAMILIES = (
    Family(
        DUALPIPE_V,
        dualpipe_v,
        source="arXiv 2412.19437, section 3.2.1",
        summary="forwards paired with full backwards, one's communication behind the other's compute; V placement",
        placement=V_SHAPE,
        chunks=2,
        splits_weight=True,
        remark=remark,
    ),
)
