"""PyTorch's compute-only CSV (torch.distributed.pipelining, ``_dump_csv(..., "compute_only")``), read and written.

One row per rank, one cell per action: ``0F0`` forward, ``0B0`` full backward, ``0I0`` input gradients, ``0W0`` weight
gradients; the first number is the *stage*, the second the microbatch; ``(0F1;7B0)OVERLAP_F_B`` is several of them at
once (here they run one after another); an empty cell is an idle slot. The rows say which rank holds which stage.
"""

from __future__ import annotations

import csv
import io
import re
import warnings
from typing import Any

from megatron_pp.plan.clock import logical_ends
from megatron_pp.plan.files import ExchangeError
from megatron_pp.plan.instruction import BACKWARD, FORWARD, WEIGHT, Instruction, instruction
from megatron_pp.plan.lower import lower
from megatron_pp.plan.order_check import check_orders
from megatron_pp.plan.placement import PLACEMENTS, Placement
from megatron_pp.plan.spec import Plan, PlanSpec

IMPORTED = "imported"  # the schedule name of a plan that came from someone else's order
_INPUT_ONLY = "I"
_ACTION = re.compile(r"(\d{1,9})([FIBW])(\d{1,9})\Z")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B\Z")
_MARK = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*\Z")  # lowering sets marks of its own
_TRANSFER = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d*\Z")

_Action = tuple[int, str, int]  # stage, one of F I B W, microbatch


def read_torch_csv(text: str, **lowering: Any) -> Plan:
    """The plan of PyTorch's compute order in ``text``, lowered as ``lowering`` (fields of PlanSpec) says. Not verified.

    Raises ExchangeError for unknown actions, missing or repeated ones, and stages that no placement has.
    """
    rows = _actions(text)
    placement = _placement(rows)
    rows = [_renumbered(row) for row in rows]
    num_microbatches = _check_complete(rows, placement)
    orders = tuple(tuple(_instruction(action, placement) for action in row) for row in rows)
    lowering.setdefault("forward_only", all(letter == "F" for row in rows for _, letter, _ in row))
    spec = PlanSpec(IMPORTED, placement.pipeline_size, placement.num_chunks, num_microbatches, **lowering)
    return Plan(spec, placement, tuple(map(tuple, lower(spec, placement, orders))), orders)


def write_torch_csv(plan: Plan) -> str:
    """The compute order of ``plan`` as PyTorch writes it, an empty cell for each idle slot of the logical clock.

    Raises PlanError for an order that can not run.
    """
    check_orders(plan.orders, plan.placement, plan.spec.num_microbatches, plan.spec.forward_only)
    orders = [[i for i in order if not plan.spec.forward_only or i.op == FORWARD] for order in plan.orders]
    ends = logical_ends(orders, plan.placement, plan.spec.num_microbatches)
    slots = max((e[-1] for e in ends if e), default=0)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank, order in enumerate(orders):
        cells = [""] * slots
        split = {(i.chunk, i.mb) for i in order if i.op == WEIGHT}
        for i, end in zip(order, ends[rank], strict=True):
            letter = _INPUT_ONLY if i.op == BACKWARD and (i.chunk, i.mb) in split else i.op
            cells[end - 1] = f"{plan.placement.stages[rank][i.chunk]}{letter}{i.mb}"
        writer.writerow(cells)
    return out.getvalue()


def _actions(text: str) -> list[list[_Action]]:
    try:
        cells = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ExchangeError(f"not a CSV file: {error}") from error
    rows = [
        [action for column, cell in enumerate(row) for action in _parse(cell.strip(), rank, column)]
        for rank, row in enumerate(cells)
    ]
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ExchangeError("there is no action in it")
    empty = next((rank for rank, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise ExchangeError(f"row {empty + 1}: rank {empty} has nothing to do")
    return rows


def _parse(cell: str, rank: int, column: int) -> list[_Action]:
    if not cell or _MARK.match(cell):
        return []
    group = _OVERLAP.match(cell)
    if group:
        return [action for part in group.group(1).split(";") for action in _parse(part.strip(), rank, column)]
    found = _ACTION.match(cell)
    if found:
        return [(int(found.group(1)), found.group(2), int(found.group(3)))]
    where = f"row {rank + 1}, cell {column + 1}"
    if _TRANSFER.match(cell):
        raise ExchangeError(f"{where}: {cell!r} is communication; write the file with format 'compute_only'")
    raise ExchangeError(f"{where}: {cell[:40]!r} is no action; it would look like 0F3, 0B3, 0I3 or 0W3")


def _placement(rows: list[list[_Action]]) -> Placement:
    """The placement whose stages are the ones that the rows hold."""
    held = [sorted({stage for stage, _, _ in row}) for row in rows]
    chunks = len(held[0])
    for kind in PLACEMENTS:
        placement = Placement(kind, len(rows), chunks)
        if all(sorted(stages) == mine for stages, mine in zip(placement.stages, held, strict=True)):
            return placement
    shown = "; ".join(f"rank {r}: {','.join(map(str, s[:6]))}" for r, s in enumerate(held[:8]))
    raise ExchangeError(
        f"the stages of {len(rows)} rank(s) are neither in a loop nor in a V ({shown}): "
        "rows or actions are missing, or the placement is another one"
    )


def _renumbered(row: list[_Action]) -> list[_Action]:
    """The row with the forwards of each stage counted from 0.

    PyTorch's own table of 1F1B (2.13) counts them from 1 on the last stage, while its backwards count from 0.
    """
    forwards: dict[int, list[int]] = {}
    for stage, letter, mb in row:
        if letter == "F":
            forwards.setdefault(stage, []).append(mb)
    backwards = {(stage, mb) for stage, letter, mb in row if letter in "IB"}
    shifted = {
        stage
        for stage, mbs in forwards.items()
        if mbs == list(range(1, len(mbs) + 1)) and (stage, 0) in backwards and (stage, len(mbs)) not in backwards
    }
    for stage in sorted(shifted):
        warnings.warn(
            f"the forwards of stage {stage} are counted from 1, its backwards from 0 (as PyTorch's 1F1B table does): "
            "read as counted from 0",
            stacklevel=2,
        )
    return [(s, letter, mb - (letter == "F" and s in shifted)) for s, letter, mb in row]


def _check_complete(rows: list[list[_Action]], placement: Placement) -> int:
    """Every stage must run every microbatch forward once, and backward once, whole or in halves; how many there are."""
    seen: dict[str, set[tuple[int, int]]] = {letter: set() for letter in "FIBW"}
    for rank, row in enumerate(rows):
        for stage, letter, mb in row:
            if (stage, mb) in seen[letter]:
                raise ExchangeError(f"row {rank + 1}: {stage}{letter}{mb} stands twice")
            seen[letter].add((stage, mb))
    forwards = seen["F"]
    stages = placement.num_stages
    count, left = divmod(len(forwards), stages)
    expected = {(s, m) for s in range(stages) for m in range(count + bool(left))}
    _same(forwards, expected, "F", "the forward")
    if not (seen["I"] or seen["B"] or seen["W"]):
        return count
    both = seen["I"] & seen["B"]
    if both:
        stage, mb = min(both)
        raise ExchangeError(f"{stage}I{mb} and {stage}B{mb} are both there: a backward is whole or in halves")
    _same(seen["I"] | seen["B"], expected, "B", "the backward")
    _same(seen["W"], seen["I"], "W", "the weight gradients, or the I,")
    return count


def _same(found: set[tuple[int, int]], expected: set[tuple[int, int]], letter: str, what: str) -> None:
    different = found ^ expected
    if different:
        stage, mb = min(different)
        name = f"{stage}{letter}{mb}"
        raise ExchangeError(f"{what} of stage {stage}, microbatch {mb} ({name}) is missing or has no counterpart")


def _instruction(action: _Action, placement: Placement) -> Instruction:
    stage, letter, mb = action
    op = {"F": FORWARD, "I": BACKWARD, "B": BACKWARD, "W": WEIGHT}[letter]
    return instruction(op, placement.homes[stage][1], mb)
