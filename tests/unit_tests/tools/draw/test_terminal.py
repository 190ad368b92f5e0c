"""Drawings in the terminal: every operation has its name, lines fit, colours differ. And the classic grid."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tools.draw.text import grid_cells, plain, render_grid, render_text
from megatron_pp.tools.draw.timeline import simulated_timeline
from tests.unit_tests.tools.draw.timelines import compared, plan_of, timeline_of


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("m", [1, 8, 64, 700])
def test_text_keeps_to_the_width(width, m):
    for line in render_text([timeline_of("1f1b", 3, m, shape=None)], width):
        assert len(line.plain) <= width


@pytest.mark.parametrize(("schedule", "m"), [("1f1b", 12), ("gpipe", 8), ("zb_h1", 8), ("interleaved_1f1b", 8)])
def test_text_names_every_operation_once(schedule, m):
    plan = plan_of(schedule, 4, m)
    timeline = simulated_timeline(simulate(plan, StageCosts.uniform(plan.placement.num_stages)))
    lines = plain(render_text([timeline])).splitlines()
    for rank, program in enumerate(plan.orders):
        row = "".join(line.removeprefix(f"rank {rank}").strip() for line in lines if line.startswith(f"rank {rank}"))
        expected = [str(at) if timeline.num_chunks > 1 else f"{at.op}{at.mb}" for at in program]
        assert re.findall(r"[FBIWST]\d+(?:\.\d+)?", row) == expected


def test_text_of_1f1b_is_the_textbook_figure():
    plan = plan_of("1f1b", 4, 4)
    timeline = simulated_timeline(simulate(plan, StageCosts.uniform(4)))
    assert plain(render_text([timeline], 60)) == (
        "1f1b P=4 V=1 M=4\n"
        "step 21 slots, bubble 42.9%, peak 4 microbatches on rank 0,\n"
        "24 transfers\n"
        "slots  |0                  |10\n"
        "rank 0 F0F1F2F3............B0==..B1==..B2==..B3==\n"
        "rank 1 ..F0F1F2........B0==F3B1==..B2==..B3==....\n"
        "rank 2 ....F0F1....B0==F2B1==F3B2==..B3==........\n"
        "rank 3 ......F0B0==F1B1==F2B2==F3B3==............\n"
        "\n"
        "F- forward  B= backward  . idle  F3 microbatch 3"
    )


def test_text_shows_transfers_between_their_ranks():
    """The step is F, 1 slot of transfer, F, B (2 slots), 1 slot of transfer, B (2 slots): 8 slots of 2 columns."""
    timeline = simulated_timeline(
        simulate(plan_of("gpipe", 2, 1), StageCosts.uniform(2), Network(1.0, link=Link(bandwidth=1.0)))
    )
    lines = plain(render_text([timeline], 30)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("rank 0"))
    assert lines[start : start + 3] == ["rank 0 F0..........B0==", "         vv      ^^", "rank 1 ....F0B0==......"]
    assert lines[-1] == "v ^ x transfers down, up, both"


def test_schedules_in_one_drawing_have_one_scale():
    """zb_h1 takes 15 slots, 1F1B takes 21. The rows have the same ratio of lengths."""
    lines = plain(render_text(compared("1f1b", "zb_h1", p=4, m=4), 60)).splitlines()
    one, other = (line for line in lines if line.startswith("rank 3"))
    assert (len(one), len(other)) == (7 + 2 * 21, 7 + 2 * 15)


def test_the_text_names_a_substitute_order():
    """DualPipeV needs M >= 2 P. With fewer microbatches the order of ZB-V is drawn, with a note."""
    assert "ZB-V's order" in plain(render_text([timeline_of("dualpipe_v", 4, 4)], 200))
    assert "ZB-V's order" not in plain(render_text([timeline_of("dualpipe_v", 4, 8)], 200))


def backgrounds(lines, colours):
    """For each operation, the background colour in the escape codes for a terminal with ``colours`` colours."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=colours, width=500)
    for line in lines:
        console.print(line, soft_wrap=True)
    blocks = re.findall(r"\x1b\[([\d;]+)m([FBIWST])\d", out.getvalue())
    return {(re.search(r"(?:4[0-7]|10[0-7]|48;.*)$", codes).group(), op) for codes, op in blocks}


@pytest.mark.parametrize(("schedule", "ops"), [("1f1b", "FB"), ("dualpipe_v", "FBIW"), ("vocab_1f1b", "FBST")])
def test_operations_differ_in_a_terminal_of_16_colours(schedule, ops):
    """Operations also differ in a terminal of 8 colours, which has no bright colours (100 to 107)."""
    few = [render_text([timeline_of(schedule)], few_colours=True), render_grid(plan_of(schedule), few_colours=True)]
    for lines in few:
        found = backgrounds(lines, "standard")
        assert {op for _, op in found} == set(ops)
        assert len({code for code, _ in found}) == len(found)
        assert all(code.startswith("4") and len(code) == 2 for code, _ in found)


# --- grid


def test_grid_of_1f1b_has_every_forward_and_backward_in_its_place():
    assert plain(render_grid(plan_of("1f1b", 4, 4), 80)) == (
        "time step   1  2  3  4  5  6  7  8  9 10 11 12 13 14\n"
        "rank 0     F0 F1 F2 F3  .  .  . B0  . B1  . B2  . B3\n"
        "rank 1      . F0 F1 F2  .  . B0 F3 B1  . B2  . B3  .\n"
        "rank 2      .  . F0 F1  . B0 F2 B1 F3 B2  . B3  .  .\n"
        "rank 3      .  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .  ."
    )


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 9)])
def test_the_grid_shows_every_operation(schedule, p, m):
    plan = plan_of(schedule, p, m)
    for row, order in zip(grid_cells(plan), plan.orders, strict=True):
        assert [at for at in row if at is not None] == list(order)
