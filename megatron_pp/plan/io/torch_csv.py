"""PyTorch's CSV of a schedule (torch.distributed.pipelining, ``_dump_csv``), read and written in both its forms.

``compute_only``   one row per rank, one cell per action: ``0F0`` forward, ``0B0`` full backward, ``0I0`` input
                   gradients, ``0W0`` weight gradients; the first number is the *stage*, the second the microbatch;
                   ``(0F1;7B0)OVERLAP_F_B`` are two that run as one; an empty cell is an idle slot
``compute_comms``  the same with ``0SEND_F0``, ``1RECV_F0``, ``1SEND_B0``, ``0RECV_B0`` where they are posted, and from
                   PyTorch 2.15 on ``0WAIT_SEND_F0``, ``1WAIT_SEND_B0`` at the latest place where a send is waited for

The rows show which rank holds which stage. What PyTorch's rows leave to its runtime (waits of receives, releases,
hand-offs and syncs) is added on reading and left out on writing.
"""

import csv
import io
import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from megatron_pp.errors import FileFormatError, InstructionError, PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import KIND_OF, MOVES, RESULT_OF, Message, channel_of, message_of, source_of
from megatron_pp.plan.ir.feature import part_word
from megatron_pp.plan.ir.instruction import FORWARD, JOINED_OPS, POST_OPS, Instruction, each, instruction, joined
from megatron_pp.plan.ir.placement import PLACEMENTS, Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.lower.clock import run_clock
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.lower.order_check import check_orders
from megatron_pp.plan.lower.syncs import syncs_of

IMPORTED = "imported"  # the schedule name of a plan that came from someone else's order
_ACTION = re.compile(r"(\d{1,9})(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B|WAIT_SEND_F|WAIT_SEND_B)(\d{1,9})\Z")
_WAITS = {"WAIT_SEND_F": ins.FREE_F, "WAIT_SEND_B": ins.FREE_B}
_PYTORCHS = {free: wait for wait, free in _WAITS.items()}
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B\Z")
_JOINED = next(iter(JOINED_OPS), "")  # the op of a group in a file; empty if no feature joins operations
_FSDP = re.compile(rf"\d+({'|'.join(ins.STAGE_OPS)})\d*\Z")  # skipped on reading: lowering adds its own
_Row = list[Instruction]  # with stages and microbatches; chunks are not known yet


def read_torch_csv(text: str, **lowering: Any) -> Plan:
    """The plan of PyTorch's order in ``text``, unverified: with its own communication if it has any, else lowered as
    ``lowering`` (fields of PlanSpec) asks. Raises FileFormatError for unknown actions and stages that no placement has,
    PlanError for missing or repeated actions and an order that cannot run.
    """
    rows = _actions(text)
    placement = _placement(rows)
    rows = [_renumbered(row) for row in rows]
    num_microbatches = _check_complete(rows, placement)
    programs = [placement.place(rank, [_on_rank(at, placement, rank) for at in row]) for rank, row in enumerate(rows)]
    orders = tuple(tuple(at for at in program if at.op not in ins.TRANSFER_OPS) for program in programs)
    lowering.setdefault("forward_only", all(at.op == FORWARD for order in orders for at in order))
    spec = PlanSpec(IMPORTED, placement.pipeline_size, placement.num_chunks, num_microbatches, **lowering)
    if all(len(order) == len(program) for order, program in zip(orders, programs, strict=True)):
        return lowered(spec, placement, orders)
    moot = next((name for name in ("policy", "lookahead") if name in lowering), None)
    if moot is not None:
        raise FileFormatError(f"the file says itself where it sends and receives: leave {moot} {lowering[moot]!r} out")
    completed = tuple(tuple(_completed(spec, placement, rank, program)) for rank, program in enumerate(programs))
    return Plan(spec, placement, completed, orders)


def write_torch_csv(plan: Plan, comms: bool = False, waits: bool = False) -> str:
    """The plan as PyTorch writes it, without copies to host memory: the compute order, an empty cell for each idle slot
    of the logical clock. ``comms``: with sends and receives in place of idle slots; ``waits``: also with the waits of
    sends, which PyTorch 2.15 asks for and older ones misread. Raises PlanError for an order that cannot run,
    FileFormatError for slices, passes of a split output layer, several modules and, with communication, messages of
    named tensors and a plan whose messages PyTorch would receive in each other's place.
    """
    if plan.spec.num_parts > 1:
        what = f"{part_word()}s of sequences; this plan has {plan.spec.num_parts}"
        raise FileFormatError(f"PyTorch's CSV has no {what}: write json")
    if plan.placement.barriers:
        raise FileFormatError("PyTorch's CSV has no passes of a split output layer, as this plan has: write json")
    if comms and plan.has_names:
        raise FileFormatError("PyTorch's CSV has no named tensors, and this plan sends some: write json")
    if hasattr(plan.spec, "graph"):
        raise FileFormatError("PyTorch's CSV has one line of stages, and this plan a graph of modules: write json")
    check_orders(plan.orders, plan.placement, plan.spec)
    if comms:
        _check_one_queue(plan)
    shown = ins.COMPUTE_OPS | POST_OPS | (ins.FREE_OPS if waits else frozenset())
    rows = [] if comms else _compute_rows(plan)
    for program in plan.programs if comms else ():
        rows.append([_cell(one) for at in program for one in _with_posts(at) if one.op in shown])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _check_one_queue(plan: Plan) -> None:
    """Raises FileFormatError if two ranks post the messages of one direction in different orders. PyTorch has one queue
    for activations and gradients, so one would be received as the other."""
    posted: dict[bool, dict[tuple[int, int], list[Message]]] = {True: defaultdict(list), False: defaultdict(list)}
    for rank, program in enumerate(plan.programs):
        for at in (one for entry in program for one in _with_posts(entry) if one.op in POST_OPS):
            channel = channel_of(at, rank)
            posted[at.op in ins.SEND_OPS][channel.source, channel.target].append(message_of(at))
    for (source, target), sent in posted[True].items():
        if sent != posted[False][source, target]:
            raise FileFormatError(
                f"ranks {source} and {target} post activations and gradients in different orders, and PyTorch has one "
                "queue for both: make the plan with --channels shared"
            )


def _with_posts(at: Instruction) -> Sequence[Instruction]:
    """The members of a batch; of joined operations, the operations and behind them the sends that go out within."""
    if at.op in JOINED_OPS:
        alone = at._replace(members=ins.operations(at))
        return alone, *(member for member in at.members if member.op in POST_OPS)
    return at.members or (at,)


def _compute_rows(plan: Plan) -> list[list[str]]:
    orders = [[_with_posts(at)[0] for at in program if at.op in ins.COMPUTE_OPS] for program in plan.programs]
    return [["" if at is None else _cell(at) for at in row] for row in run_clock(orders, plan.placement).slots()]


def _cell(at: Instruction) -> str:
    if at.members:
        return f"({';'.join(map(_cell, at.members))})OVERLAP_F_B"
    return f"{at.stage}{_PYTORCHS.get(at.op, at.op)}{at.mb}"


def _completed(spec: PlanSpec, placement: Placement, rank: int, program: Sequence[Instruction]) -> list[Instruction]:
    """A rank's compute, sends and receives, together with the instructions that PyTorch's rows imply: each WAIT and
    hand-off right before its use; each FREE ``release_after`` operations after its send and before its own backward, or
    earlier if the row waits for the send earlier; and syncs.
    """
    compute = [at for at in program if at.op not in ins.TRANSFER_OPS]
    before, after = syncs_of(spec, rank, compute)
    backwards = {
        (at.stage, at.mb): i for i, entry in enumerate(compute) for at in each([entry]) if at.op in ins.BACKWARD_OPS
    }
    due: dict[Instruction, int] = {}  # a FREE that is still to come -> the operation before which it is due
    sent: set[Instruction] = set()
    completed: list[Instruction] = []
    index = 0
    for at in program:
        if at.op in ins.FREE_OPS:
            if at not in sent:
                raise PlanError(f"row {rank + 1}: {_cell(at)} has no send before it")
            completed += [at] if due.pop(at, None) is not None else []
        elif at.op in POST_OPS:
            completed.append(at)
            if at.op in ins.SEND_OPS:
                free = at._replace(op=MOVES[KIND_OF[at.op]].free)
                sent.add(free)
                due[free] = min(index + spec.release_after, len(compute))
                if free.op == ins.FREE_F:
                    due[free] = min(due[free], max(index, backwards.get((at.stage, at.mb), due[free])))
        else:
            completed += [free for free, place in due.items() if place == index]
            due = {free: place for free, place in due.items() if place > index}
            completed += after.get(index - 1, ())
            completed += [wait for one in each([at]) for wait in _inputs(placement, rank, one)]
            completed += before.get(index, ())
            completed.append(at)
            index += 1
    return [*completed, *sorted(due, key=due.__getitem__), *after.get(index - 1, ())]


def _inputs(placement: Placement, rank: int, at: Instruction) -> list[Instruction]:
    """The WAIT or hand-off that brings the input of ``at``."""
    source = source_of(at.op, at.stage, placement.num_stages)
    if source is None:
        return []
    moves = MOVES[RESULT_OF[at.op]]
    sender = placement.homes[source][0]
    return [at._replace(op=moves.hand) if sender == rank else at._replace(op=moves.wait, peer=sender)]


def _actions(text: str) -> list[_Row]:
    try:
        cells = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise FileFormatError(f"not a CSV file: {error}") from error
    rows: list[_Row] = []
    for rank, row in enumerate(cells):
        rows.append([at for column, cell in enumerate(row) for at in _parse(cell.strip(), rank, column)])
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise FileFormatError("there is no action in it")
    for rank, actions in enumerate(rows):
        if not actions:
            raise FileFormatError(f"row {rank + 1}: rank {rank} has nothing to do")
    return rows


def _parse(cell: str, rank: int, column: int) -> list[Instruction]:
    if not cell or _FSDP.match(cell):
        return []
    group = _OVERLAP.match(cell)
    if group and _JOINED:
        members = [at for part in group.group(1).split(";") for at in _parse(part.strip(), rank, column)]
        return [Instruction(_JOINED, members=tuple(members))]
    found = _ACTION.match(cell)
    if found:
        op = _WAITS.get(found.group(2), found.group(2))
        return [Instruction(op, int(found.group(1)), int(found.group(3)))]
    where = f"row {rank + 1}, cell {column + 1}"
    raise FileFormatError(f"{where}: {cell[:40]!r} is no action; it would look like 0F3, 0B3, 0I3, 0W3 or 0SEND_F3")


def _compute(row: _Row) -> list[Instruction]:
    return [at for at in each(row) if at.op in ins.SINGLE_COMPUTE_OPS]


def _placement(rows: list[_Row]) -> Placement:
    """The placement whose stages are the ones that the rows compute."""
    held = [sorted({at.stage for at in _compute(row)}) for row in rows]
    chunks = len(held[0])
    for kind in PLACEMENTS if chunks else ():
        placement = Placement(kind, len(rows), chunks)
        if all(sorted(stages) == mine for stages, mine in zip(placement.stages, held, strict=True)):
            return placement
    shown = "; ".join(f"rank {r}: {','.join(map(str, s[:6]))}" for r, s in enumerate(held[:8]))
    raise FileFormatError(
        f"the stages of {len(rows)} rank(s) are neither in a loop nor in a V ({shown}): "
        "rows or actions are missing, or the placement is another one"
    )


def _renumbered(row: _Row) -> _Row:
    """The row with the forwards of each stage counted from 0: PyTorch's own table of 1F1B (2.13) counts those of the
    last stage from 1, and their backwards from 0.
    """
    forwards: dict[int, list[int]] = defaultdict(list)
    for at in _compute(row):
        if at.op == FORWARD:
            forwards[at.stage].append(at.mb)
    backwards = {(at.stage, at.mb) for at in _compute(row) if at.op in ins.BACKWARD_OPS}
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
    if not shifted:
        return row
    return [at._replace(mb=at.mb - 1) if at.op == FORWARD and at.stage in shifted else at for at in row]


def _check_complete(rows: list[_Row], placement: Placement) -> int:
    """The number of microbatches. Raises PlanError unless every stage runs each of them forward and backward once."""
    seen: dict[str, set[tuple[int, int]]] = {op: set() for op in ins.SINGLE_COMPUTE_OPS}
    for rank, row in enumerate(rows):
        for at in _compute(row):
            if (at.stage, at.mb) in seen[at.op]:
                raise PlanError(f"row {rank + 1}: {_cell(at)} occurs twice")
            seen[at.op].add((at.stage, at.mb))
    forwards, whole, halves, weights = (seen[op] for op in "FBIW")
    if whole & halves:
        stage, mb = min(whole & halves)
        raise PlanError(f"{stage}I{mb} and {stage}B{mb} are both there: a backward is whole or in halves")
    count, left = divmod(len(forwards), placement.num_stages)
    expected = {(stage, mb) for stage in range(placement.num_stages) for mb in range(count + bool(left))}
    for letter, what, found, wanted in (
        ("F", "the forward", forwards, expected),
        ("B", "the backward", whole | halves, expected if whole | halves | weights else set()),
        ("W", "the weight gradients, or the I,", weights, halves),
    ):
        if found != wanted:
            stage, mb = min(found ^ wanted)
            name = f"{stage}{letter}{mb}"
            raise PlanError(f"{what} of stage {stage}, microbatch {mb} ({name}) is missing or has no counterpart")
    return count


def _on_rank(at: Instruction, placement: Placement, rank: int) -> Instruction:
    """``at`` with its chunk in place of its stage. Raises FileFormatError if ``rank`` does not hold the stage."""
    if at.members:
        if len(at.members) != 2:
            raise FileFormatError(f"row {rank + 1}: {_cell(at)}: a pair is of two actions, a forward and a backward")
        members = (_on_rank(member, placement, rank) for member in at.members)
        try:
            return joined(at.op, sorted(members, key=lambda member: member.op != FORWARD))
        except InstructionError as error:
            raise FileFormatError(f"row {rank + 1}: {_cell(at)}: {error}") from error
    if not 0 <= at.stage < placement.num_stages or placement.homes[at.stage][0] != rank:
        raise FileFormatError(f"row {rank + 1}: {_cell(at)}: stage {at.stage} is not on rank {rank}")
    return instruction(at.op, placement.homes[at.stage][1], at.mb)
