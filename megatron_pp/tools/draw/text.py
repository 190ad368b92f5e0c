"""A timeline in the terminal: a row per rank, a column per interval of time. A timeline that is too wide for the screen
is cut into panels.

It can be read without colour. A block begins with its name (``F3``: forward of microbatch 3; ``F1.3`` with several
chunks). Its other columns show the operation: ``-`` forward, ``=`` backward, ``+`` input gradients, ``~`` weight
gradients, ``:`` and ``;`` S and T of a split output layer. ``.`` is idle.

Rows between ranks show transfers: ``v`` to the higher rank, ``^`` to the lower rank, ``x`` both ways. They also show
copies of the rank above them: ``o`` to host memory, ``l`` back, ``c`` both ways.

``render_grid`` is the textbook table: a row per rank, a column per time step, every operation one step long.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from textwrap import wrap

from rich.text import Text

from megatron_pp.plan.ir.instruction import FORWARD, Instruction, unjoined
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.lower.clock import run_clock
from megatron_pp.plan.simulate.simulation import Event, Transfer
from megatron_pp.tools.draw.facts import legend_entries, name_in_words, summary, tick_label, tick_step
from megatron_pp.tools.draw.palette import NAMES, OPERATIONS, block_colour, block_name, colour_style
from megatron_pp.tools.draw.timeline import COLLECTIVES, COPIES, STRIPS, Lane, Timeline

_FILL = dict(zip(OPERATIONS, "-=+~:;", strict=False))
_IDLE = "."
_STRIP_MARKS = " olc", " urm"
_MAX_PANELS = 6


@dataclass(frozen=True)
class Scale:
    """Converts time to columns. The whole timeline has ``columns``; a panel shows ``width`` of them."""

    per_column: float
    columns: int
    width: int

    def column(self, time: float) -> int:
        """The column whose left edge is nearest to ``time``."""
        return min(self.columns, round(time / self.per_column))

    def within(self, time: float) -> int:
        """The column that ``time`` falls into."""
        return min(self.columns - 1, int(time / self.per_column))


def render_text(timelines: Sequence[Timeline], width: int = 80, few_colours: bool = False) -> list[Text]:
    """The timelines below each other, to one scale, and a legend. No line is wider than ``width`` columns.

    ``few_colours``: the terminal has 8 or 16 colours.
    """
    margin = max(len(lane.name) for t in timelines for lane in t.lanes) + 1
    scale = choose_scale(timelines, max(10, width - margin))
    lines: list[Text] = []
    for timeline in timelines:
        lines += [Text(line, style="bold") for line in wrap(timeline.title, width)]
        lines += [Text(line) for line in wrap(", ".join(summary(timeline)), width)]
        lines += [Text(line, style="italic") for line in wrap(timeline.note, width)]
        lines += [*_panels(timeline, scale, margin, few_colours), Text()]
    return [*lines, *_legend(timelines, width, few_colours)]


def _panels(timeline: Timeline, scale: Scale, margin: int, few_colours: bool) -> list[Text]:
    scale = replace(scale, columns=min(scale.columns, max(1, math.ceil(timeline.end / scale.per_column - 1e-6))))
    transfers = _transfer_rows(timeline, scale)
    rows: list[tuple[str, Text]] = []
    for rank, lane in enumerate(timeline.lanes):
        rows.append((lane.name, _lane_row(lane, timeline, scale, few_colours)))
        for kinds, marks in zip(STRIPS, _STRIP_MARKS, strict=True):
            copies = [(copy, bool(which)) for which, ops in enumerate(kinds) for copy in lane.copied(ops)]
            if copies:
                rows.append(("", Text(_marks(copies, scale, marks), style="dim")))
        if rank in transfers:
            rows.append(("", Text(transfers[rank], style="dim")))
    lines: list[Text] = []
    for start in range(0, scale.columns, scale.width):
        stop = min(start + scale.width, scale.columns)
        lines.append(Text(timeline.unit.ljust(margin)[:margin] + _axis(scale, start, stop), style="dim"))
        lines += [Text(name.ljust(margin)) + row[start:stop] for name, row in rows]
        lines.append(Text())
    return lines[:-1]


def choose_scale(timelines: Sequence[Timeline], width: int) -> Scale:
    """A scale at which the names, or at least the letters, of short blocks fit in at most _MAX_PANELS panels. If none
    does, one panel."""
    end = max(t.end for t in timelines)
    blocks = [(t, e) for t in timelines for lane in t.lanes for e in lane.compute if e.end > e.start]
    if not blocks:
        return Scale(max(end, 1.0), 1, width)
    # The shortest blocks that together take less than a twentieth of the time do not count.
    lengths = sorted(e.end - e.start for _, e in blocks)
    little = sum(lengths) / 20
    shortest = next(length for length, total in zip(lengths, accumulate(lengths), strict=True) if total >= little)
    longest_name = max(len(block_name(e.instruction, t.num_chunks)) for t, e in blocks)
    for name in range(longest_name, 0, -1):
        columns = round(end / shortest * name)
        if columns <= width * _MAX_PANELS:
            columns *= max(1, width // columns)
            return Scale(end / columns, columns, width)
    return Scale(end / width, width, width)


def _legend(timelines: Sequence[Timeline], width: int, few_colours: bool) -> list[Text]:
    """The meaning of the letters, marks and colours."""
    entries = []
    for key in legend_entries(timelines):
        if key.kind in OPERATIONS:
            entry = Text()
            sample = key.kind.ljust(max(2, len(key.colours)), _FILL[key.kind])  # a letter for each shade
            for k, letter in enumerate(sample):
                colour = key.colours[min(k, len(key.colours) - 1)]
                entry.append(letter, style=colour_style(key.kind, colour, few_colours))
            entries.append(entry.append(f" {NAMES[key.kind]}"))
    entries.append(Text(f"{_IDLE} idle"))
    sliced = any(e.instruction.part >= 0 for t in timelines for lane in t.lanes for e in lane.compute)
    entries += [Text(name_in_words(chunks, sliced)) for chunks in sorted({min(t.num_chunks, 2) for t in timelines})]
    if any(t.has_transfers for t in timelines):
        entries.append(Text("v ^ x transfers down, up, both"))
    if any(t.has_copies(*COPIES) for t in timelines):
        entries.append(Text("o l c copies to host memory, back, both"))
    if any(t.has_copies(*COLLECTIVES) for t in timelines):
        entries.append(Text("u r m unshards, gradient reductions, both"))
    lines = [Text()]
    for entry in entries:
        if len(lines[-1]) and len(lines[-1]) + len(entry) > width:
            lines.append(Text())
        lines[-1] = Text("  ").join([lines[-1], entry]) if len(lines[-1]) else entry
    return lines


def _lane_row(lane: Lane, timeline: Timeline, scale: Scale, few_colours: bool) -> Text:
    if len(lane.compute) > scale.columns:  # the typical block is thinner than a column
        return _crowded_row(lane, timeline, scale, few_colours)
    row = Text()
    for event in lane.compute:
        start = max(scale.column(event.start), len(row))
        stop = scale.column(event.end)
        row.append(_IDLE * (start - len(row)), style="dim")
        if stop > start:
            op = event.instruction.op
            label = block_name(event.instruction, timeline.num_chunks)
            block = (label if len(label) <= stop - start else op).ljust(stop - start, _FILL[op])
            row.append(block, style=_style(event.instruction, timeline.num_chunks, few_colours))
    row.append(_IDLE * (scale.columns - len(row)), style="dim")
    return row


def _crowded_row(lane: Lane, timeline: Timeline, scale: Scale, few_colours: bool) -> Text:
    """Every column shows the operation that fills most of it."""
    columns: list[dict[str, list[tuple[float, Event]]]] = [defaultdict(list) for _ in range(scale.columns)]
    for event in lane.compute:
        for column in range(scale.within(event.start), scale.within(event.end) + 1):
            start = column * scale.per_column
            stop = (column + 1) * scale.per_column
            part = min(stop, event.end) - max(start, event.start)
            columns[column][event.instruction.op].append((part, event))
    row = Text()
    for parts in columns:
        totals = {op: sum(part for part, _ in events) for op, events in parts.items()}
        if not totals or 2 * sum(totals.values()) < scale.per_column:
            row.append(_IDLE, style="dim")
        else:
            op = max(totals, key=lambda o: totals[o])
            _, longest = max(parts[op], key=lambda one: one[0])
            row.append(op, style=_style(longest.instruction, timeline.num_chunks, few_colours))
    return row


def _style(at: Instruction, num_chunks: int, few_colours: bool) -> str:
    return colour_style(at.op, block_colour(at.op, at.chunk, num_chunks), few_colours)


def _transfer_rows(timeline: Timeline, scale: Scale) -> dict[int, str]:
    """The rows of transfers, by the rank that they are below. Rank r has the transfers between r and r + 1; the last
    rank has all others, such as those between the last rank and the first."""
    under: dict[int, list[tuple[Transfer, bool]]] = defaultdict(list)
    for transfer in timeline.transfers:
        if transfer.end > transfer.start:
            low, high = sorted((transfer.source, transfer.target))
            near = high == low + 1
            back = near == (transfer.source > transfer.target)
            under[low if near else len(timeline.lanes) - 1].append((transfer, back))
    return {rank: _marks(spans, scale, " v^x") for rank, spans in under.items()}


def _marks(spans: Iterable[tuple[Event | Transfer, bool]], scale: Scale, marks: str) -> str:
    """A row with a mark per column. ``marks`` has four: no span, a span forth, a span back (True), and both."""
    row = [0] * scale.columns
    for span, back in spans:
        first = scale.within(span.start)
        for column in range(first, max(first + 1, scale.column(span.end))):
            row[column] |= 2 if back else 1
    return "".join(marks[found] for found in row)


def _axis(scale: Scale, start: int, stop: int) -> str:
    """The time axis: round numbers above their columns."""
    line = [" "] * (stop - start)
    shown = min(scale.width, scale.columns)
    step = tick_step(shown * scale.per_column, shown // 10)
    first = math.ceil(start * scale.per_column / step - 1e-9)
    last = math.floor(stop * scale.per_column / step + 1e-9)
    for k in range(first, last + 1):
        column = scale.column(k * step) - start
        text = "|" + tick_label(k * step, step)
        if column + len(text) <= len(line):
            line[column : column + len(text)] = text
    return "".join(line)


def plain(lines: Sequence[Text]) -> str:
    """The lines without colour, for files and tests."""
    return "\n".join(line.plain.rstrip() for line in lines)


def grid_cells(plan: Plan) -> list[list[Instruction | None]]:
    """``cells[rank][step]`` is the instruction that the rank runs in this step, or None if it is idle."""
    training = not plan.spec.forward_only
    orders = [[at for at in unjoined(order) if at.op == FORWARD or training] for order in plan.orders]
    return run_clock(orders, plan.placement).slots()


def render_grid(plan: Plan, width: int = 80, few_colours: bool = False) -> list[Text]:
    """The table, in panels of at most ``width`` columns. The header row numbers the time steps from 1.

    ``few_colours``: the terminal has 8 or 16 colours.
    """
    cells = grid_cells(plan)
    chunks = plan.spec.num_chunks
    steps = len(cells[0])
    names = [block_name(at, chunks) for row in cells for at in row if at is not None]
    cell = max(map(len, [str(steps), *names])) + 1
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
        line.append(name, style=_style(at, chunks, few_colours))
    return line
