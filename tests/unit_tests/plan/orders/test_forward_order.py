"""Of which schedules a rank runs its forwards in the order of Megatron's, by which it draws the masks of dropout; and
what the page for users of Megatron says of the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import FORWARD
from megatron_pp.plan.ir.placement import V_SHAPE
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES

PAGE = Path(__file__).resolve().parents[4] / "docs" / "megatron.md"
LOOPS = [name for name, family in SCHEDULES.items() if family.placement != V_SHAPE and not family.barriers]
SLICED = [name for name in LOOPS if "seq" in name]  # refused under Megatron
OTHERS = ("breadth_first", "gis_h", "pipe_offload")
WITH_CHUNKS = ("interleaved_1f1b", "interleaved_zb", "gis", "combined_1f1b", "auto", *OTHERS)


def forwards(schedule: str, size: int, chunks: int, microbatches: int) -> list[list[tuple[int, int]]]:
    orders = build_plan(PlanSpec(schedule, size, chunks, microbatches)).orders
    return [[(at.chunk, at.mb) for at in order if at.op == FORWARD] for order in orders]


@pytest.mark.parametrize("name", sorted({*LOOPS} - {*SLICED}))
def test_without_virtual_stages_forwards_are_in_megatrons_order(name: str) -> None:
    assert forwards(name, 4, 1, 8) == [[(0, mb) for mb in range(8)]] * 4


@pytest.mark.parametrize("name", WITH_CHUNKS)
def test_with_virtual_stages_the_page_says_which_run_in_another_order(name: str) -> None:
    assert (forwards(name, 4, 2, 8) != forwards("interleaved_1f1b", 4, 2, 8)) == (name in OTHERS)


def test_the_page_names_every_schedule_of_several_chunks() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("gives other numbers\n")[2].partition("\n## ")[0]
    in_v = [name for name, family in SCHEDULES.items() if family.placement == V_SHAPE]
    assert [name for name in (*WITH_CHUNKS, *in_v) if f"`{name}`" not in table] == []
