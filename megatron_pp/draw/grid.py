"""The textbook table: one row per rank, one column per time step, every operation one step long whatever it costs.

A cell names the operation and its microbatch, as in every drawing: ``F2``, ``B0``; with several chunks a rank, ``F1.2``
is of chunk 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from megatron_pp.draw.palette import block_name, block_style
from megatron_pp.plan.clock import run_clock
from megatron_pp.plan.instruction import FORWARD, Instruction, without_pairs
from megatron_pp.plan.spec import Plan

_IDLE = "."


def grid_cells(plan: Plan) -> list[list[Instruction | None]]:
    """``cells[rank][step]``: what runs there, None where the rank is idle."""
    training = not plan.spec.forward_only
    orders = [[at for at in without_pairs(order) if at.op == FORWARD or training] for order in plan.orders]
    ends = run_clock(orders, plan.placement).ends
    steps = max((e[-1] for e in ends if e), default=0)
    cells: list[list[Instruction | None]] = [[None] * steps for _ in orders]
    for rank, order in enumerate(orders):
        for at, end in zip(order, ends[rank], strict=True):
            cells[rank][end - 1] = at
    return cells


def render_grid(plan: Plan, width: int = 80, few_colours: bool = False) -> list[Text]:
    """The table, in panels of at most ``width`` columns; the header row numbers the time steps from 1.

    ``few_colours``: for a terminal of 8 or 16.
    """
    cells = grid_cells(plan)
    chunks = plan.spec.num_chunks
    steps = len(cells[0])
    cell = max(len(str(steps)), *(len(block_name(at, chunks)) for row in cells for at in row if at is not None)) + 1
    heads = [f"rank {rank}" for rank in range(len(cells))]
    margin = max(len("time step"), max(map(len, heads))) + 1
    per_panel = max(1, (width - margin) // cell)
    lines: list[Text] = []
    for start in range(0, steps, per_panel):
        stop = min(steps, start + per_panel)
        numbers = "".join(str(step + 1).rjust(cell) for step in range(start, stop))
        lines.append(Text("time step".ljust(margin) + numbers, style="dim"))
        for head, row in zip(heads, cells, strict=True):
            lines.append(_row(head.ljust(margin), row[start:stop], cell, chunks, few_colours))
        lines.append(Text())
    return lines[:-1]


def _row(head: str, row: Sequence[Instruction | None], cell: int, chunks: int, few_colours: bool) -> Text:
    line = Text(head)
    for at in row:
        if at is None:
            line.append(_IDLE.rjust(cell), style="dim")
            continue
        name = block_name(at, chunks)
        line.append(" " * (cell - len(name)))
        line.append(name, style=block_style(at.op, at.chunk, chunks, few_colours))
    return line
