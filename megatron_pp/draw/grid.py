"""The textbook table: one row per rank, one column per time step, every operation one step long.

With one chunk a rank, rank r is stage r. A cell names the operation and its microbatch: ``F2``, ``B0``; ``F1.2`` is of
chunk 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.text import Text

from megatron_pp.draw.palette import block_name, block_style
from megatron_pp.plan.clock import run_clock
from megatron_pp.plan.instruction import BACKWARD_OPS, FORWARD, SEND_OPS, Instruction, each, without_pairs
from megatron_pp.plan.spec import Plan

_IDLE = "."


@dataclass(frozen=True)
class GridFacts:
    """What the grid of one schedule shows.

    steps        columns of the grid
    idle_steps   empty cells, per rank
    in_flight    per rank, the most (chunk, microbatch) pairs between forward and backward
    sent         per rank, messages sent in one training step
    """

    name: str
    steps: int
    idle_steps: tuple[int, ...]
    in_flight: tuple[int, ...]
    sent: tuple[int, ...]

    @property
    def bubble_share(self) -> float:
        return sum(self.idle_steps) / (self.steps * len(self.idle_steps)) if self.steps else 0.0


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


def grid_facts(plan: Plan) -> GridFacts:
    cells = grid_cells(plan)
    return GridFacts(
        name=plan.spec.schedule,
        steps=len(cells[0]),
        idle_steps=tuple(row.count(None) for row in cells),
        in_flight=tuple(_in_flight(row) for row in cells),
        sent=tuple(sum(at.op in SEND_OPS for at in each(program)) for program in plan.programs),
    )


def render_grid(plan: Plan, width: int = 80) -> list[Text]:
    """The table, in panels of at most ``width`` columns; the header row numbers the time steps from 1."""
    cells = grid_cells(plan)
    chunks = plan.spec.num_chunks
    steps = len(cells[0])
    cell = max(len(str(steps)), *(len(block_name(at, chunks)) for row in cells for at in row if at is not None)) + 1
    heads = [f"{'stage' if chunks == 1 else 'rank'} {rank}" for rank in range(len(cells))]
    margin = max(len("time step"), max(map(len, heads))) + 1
    per_panel = max(1, (width - margin) // cell)
    lines: list[Text] = []
    for start in range(0, steps, per_panel):
        stop = min(steps, start + per_panel)
        numbers = "".join(str(step + 1).rjust(cell) for step in range(start, stop))
        lines.append(Text("time step".ljust(margin) + numbers, style="dim"))
        lines += [_row(head, row[start:stop], margin, cell, chunks) for head, row in zip(heads, cells, strict=True)]
        lines.append(Text())
    return lines[:-1]


def _row(head: str, row: Sequence[Instruction | None], margin: int, cell: int, chunks: int) -> Text:
    line = Text(head.ljust(margin))
    for at in row:
        if at is None:
            line.append(_IDLE.rjust(cell), style="dim")
            continue
        name = block_name(at, chunks)
        line.append(" " * (cell - len(name)))
        line.append(name, style=block_style(at.op, at.chunk, chunks))
    return line


def _in_flight(row: Sequence[Instruction | None]) -> int:
    changes = ((at.op == FORWARD) - (at.op in BACKWARD_OPS) for at in row if at is not None)
    return max(accumulate(changes, initial=0))
