"""Plans in files: our own CSV and JSON, both the whole plan, so that reading gives back an equal ``Plan``.

PyTorch's compute-only CSV is in ``torch_csv.py``; ``load_plan`` tells the three apart by their content. Nothing in a
file is ever executed: cells are matched against the instruction set, and numbers are checked before anything of their
size is made.

CSV   ``megatron_pp plan,1``, one row per field of the spec, ``placement,loop``, one ``program,RANK,...`` row per rank,
      ``order,RANK,...`` rows where the compute order is not simply the compute of the programs, and ``end,ROWS``.
JSON  an object with the same content; programs are strings, as ``format_program`` prints them.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from megatron_pp.plan.files import ExchangeError, read_text, write_whole
from megatron_pp.plan.instruction import (
    COMPUTE_OPS,
    Instruction,
    InstructionError,
    format_program,
    parse_instruction,
    parse_program,
)
from megatron_pp.plan.measured import Measured
from megatron_pp.plan.placement import PLACEMENTS, Placement
from megatron_pp.plan.spec import Plan, PlanError, PlanSpec
from megatron_pp.plan.torch_csv import read_torch_csv, write_torch_csv

FORMATS = ("csv", "json", "torch-csv")
_CSV_HEAD = "megatron_pp plan"
_JSON_HEAD = "megatron_pp.plan"
_VERSION = 1
_REQUIRED = {"schedule": str, "pipeline_size": int, "num_chunks": int, "num_microbatches": int}
_Programs = tuple[tuple[Instruction, ...], ...]


def save_plan(plan: Plan, path: str | os.PathLike[str], form: str | None = None) -> None:
    """Write ``plan`` to ``path``, whole or not at all. ``form``: one of FORMATS; by default the file's ending."""
    chosen = form or Path(path).suffix.lstrip(".")
    write_whole(path, format_plan(plan, chosen))


def format_plan(plan: Plan, form: str) -> str:
    """The plan as text of one of FORMATS. Raises ExchangeError for another one."""
    if form == "csv":
        return _to_csv(plan)
    if form == "json":
        return _to_json(plan)
    if form == "torch-csv":
        return write_torch_csv(plan)
    raise ExchangeError(f"plans are written as {', '.join(FORMATS)}, not as {form!r}")


def load_plan(path: str | os.PathLike[str], **lowering: Any) -> Plan:
    """Read a plan of any of FORMATS. Not verified yet: what its instructions do together is ``verify``'s question.

    ``lowering`` are fields of PlanSpec (policy, channels, ...) for PyTorch's CSV, which has compute only.
    Raises ExchangeError naming the file, the place and what is wrong with it.
    """
    text = read_text(path)
    try:
        return parse_plan(text, **lowering)
    except PlanError as error:
        raise ExchangeError(f"{path}: {error}") from error


def parse_plan(text: str, **lowering: Any) -> Plan:
    """The plan in ``text``, as load_plan reads it."""
    if text.lstrip().startswith("{"):
        return _from_json(text)
    if text.startswith(_CSV_HEAD):
        return _from_csv(text)
    return read_torch_csv(text, **lowering)


def _compute_of(programs: Sequence[Sequence[Instruction]]) -> _Programs:
    return tuple(tuple(i for i in program if i.op in COMPUTE_OPS) for program in programs)


# --- CSV


def _to_csv(plan: Plan) -> str:
    rows: list[list[str]] = [[_CSV_HEAD, str(_VERSION)]]
    rows += [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in spec_values(plan.spec)]
    rows += [["placement", plan.placement.kind], ["remark", plan.remark]]
    rows += [["program", str(r), *map(str, p)] for r, p in enumerate(plan.programs)]
    if plan.orders != _compute_of(plan.programs):
        rows += [["order", str(r), *map(str, o)] for r, o in enumerate(plan.orders)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows(rows)
    writer.writerow(["end", str(len(rows))])
    return out.getvalue()


def _from_csv(text: str) -> Plan:
    rows = [row for row in _csv_rows(text) if row]
    if rows[0][1:] != [str(_VERSION)]:
        version = ",".join(rows[0][1:]) or "(none)"
        raise ExchangeError(f"version {version} of the plan format is not known; this reads {_VERSION}")
    if rows[-1] != ["end", str(len(rows) - 1)]:
        raise ExchangeError(
            "the last row is not 'end' with the number of rows before it: the file is cut off or damaged"
        )
    found: dict[str, Any] = {}
    listed: dict[str, list[list[str]]] = {"program": [], "order": []}
    for number, row in enumerate(rows[1:-1], start=2):
        if row[0] in listed:
            _expect_rank(row, len(listed[row[0]]), number)
            listed[row[0]].append(row[2:])
        elif len(row) != 2 or row[0] in found:
            raise ExchangeError(f"row {number}: expected a name and its value, once; found {','.join(row)[:60]!r}")
        else:
            found[row[0]] = row[1]
    kind, remark = found.pop("placement", "(missing)"), found.pop("remark", "")
    spec = spec_from_values({name: _plain_value(value) for name, value in found.items()})
    programs = _parse_cells(listed["program"], "program")
    orders = _parse_cells(listed["order"], "order") if listed["order"] else None
    return _assemble(spec, kind, programs, orders, remark)


def _csv_rows(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ExchangeError(f"not a CSV file: {error}") from error


def _expect_rank(row: list[str], rank: int, number: int) -> None:
    if len(row) < 2 or row[1] != str(rank):
        raise ExchangeError(f"row {number}: expected the {row[0]} of rank {rank}, found {','.join(row[:2])!r}")


def _plain_value(text: str) -> Any:
    """A word as it is, anything else as JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parse_cells(rows: Sequence[Sequence[str]], what: str) -> _Programs:
    return tuple(tuple(_parse_cell(c, what, rank, k) for k, c in enumerate(row)) for rank, row in enumerate(rows))


def _parse_cell(cell: str, what: str, rank: int, position: int) -> Instruction:
    try:
        return parse_instruction(cell)
    except InstructionError as error:
        raise ExchangeError(f"{what} of rank {rank}, cell {position + 1}: {error}") from error


# --- JSON


def _to_json(plan: Plan) -> str:
    content: dict[str, Any] = {
        "format": _JSON_HEAD,
        "version": _VERSION,
        "spec": dict(spec_values(plan.spec)),
        "placement": plan.placement.kind,
        "remark": plan.remark,
        "programs": [format_program(p) for p in plan.programs],
    }
    if plan.orders != _compute_of(plan.programs):
        content["orders"] = [format_program(o) for o in plan.orders]
    return json.dumps(content, indent=1) + "\n"


def _from_json(text: str) -> Plan:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"not a JSON file, or cut off: {error}") from error
    if content.get("format") != _JSON_HEAD or content.get("version") != _VERSION:
        head = {"format": _JSON_HEAD, "version": _VERSION}
        raise ExchangeError(f"no plan that this reads; it would hold {json.dumps(head)[1:-1]}")
    if not isinstance(content.get("spec"), dict):
        raise ExchangeError("'spec' is missing or no object")
    spec = spec_from_values(content["spec"])
    programs = _parse_lines(content.get("programs"), "programs")
    orders = _parse_lines(content["orders"], "orders") if "orders" in content else None
    return _assemble(spec, content.get("placement", "(missing)"), programs, orders, content.get("remark", ""))


def _parse_lines(lines: Any, what: str) -> _Programs:
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ExchangeError(f"'{what}' is missing or no list of strings, one per rank")
    programs = []
    for rank, line in enumerate(lines):
        try:
            programs.append(tuple(parse_program(line)))
        except InstructionError as error:
            raise ExchangeError(f"{what}, rank {rank}: {error}") from error
    return tuple(programs)


# --- Both


def spec_values(spec: PlanSpec) -> list[tuple[str, Any]]:
    """The fields of the spec, as JSON takes them."""
    values = [(f.name, getattr(spec, f.name)) for f in fields(PlanSpec)]
    return [(name, asdict(value) if isinstance(value, Measured) else value) for name, value in values]


def spec_from_values(values: dict[str, Any]) -> PlanSpec:
    """The spec of what ``spec_values`` gave, back from a file. Raises ExchangeError, PlanError."""
    known = {f.name: f for f in fields(PlanSpec)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ExchangeError(f"the spec has no field {unknown[0]!r}; its fields are {', '.join(known)}")
    missing = [name for name, f in known.items() if f.default is MISSING and name not in values]
    if missing:
        raise ExchangeError(f"the spec lacks {', '.join(missing)}")
    measured = values.pop("measured", None)
    for name, value in values.items():
        expected = type(known[name].default) if known[name].default is not MISSING else _REQUIRED[name]
        if type(value) is not expected:
            raise ExchangeError(f"the spec's {name} is {value!r}; it must be of type {expected.__name__}")
    if measured is not None and not isinstance(measured, dict):
        raise ExchangeError("the spec's 'measured' must be an object of measured values, or null")
    return PlanSpec(**values, measured=None if measured is None else Measured.from_dict(measured))


def _assemble(spec: PlanSpec, kind: Any, programs: _Programs, orders: _Programs | None, remark: Any) -> Plan:
    if kind not in PLACEMENTS:
        raise ExchangeError(f"placement {kind!r} is not known; it is one of {', '.join(PLACEMENTS)}")
    for what, listed in (("programs", programs), ("orders", programs if orders is None else orders)):
        if len(listed) != spec.pipeline_size:
            raise ExchangeError(f"there are {what} of {len(listed)} ranks; the pipeline has {spec.pipeline_size}")
    cells = spec.num_chunks * spec.num_microbatches
    for rank, program in enumerate(programs):
        if len(program) < cells:
            raise ExchangeError(
                f"rank {rank} has {len(program)} instructions for {spec.num_chunks} chunk(s) of "
                f"{spec.num_microbatches} microbatches: the program is cut off, or the spec is another plan's"
            )
    placement = Placement(kind, spec.pipeline_size, spec.num_chunks)
    return Plan(spec, placement, programs, _compute_of(programs) if orders is None else orders, str(remark))
