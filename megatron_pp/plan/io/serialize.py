"""Reads and writes plans in files: as JSON, which holds the whole plan, so that reading gives an equal ``Plan``; and as
PyTorch's CSV (``torch_csv.py``). ``load_plan`` tells them apart by their content.

The JSON is one object: ``format``, ``version`` (2), ``spec`` (the fields of PlanSpec, and of several modules their
``graph``), ``placement``, ``remark``, and ``programs``, a list per rank of objects with the keys ``op``, ``stage``,
``chunk`` and ``mb`` (null where they do not apply) and, where they apply, ``peer``, ``slice``, ``tensor`` and
``members``; also ``orders`` where the compute order is not that of the programs.

Nothing in a file is executed. Words are matched against the instruction set, and numbers are checked before anything of
their size is allocated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from megatron_pp.errors import FileFormatError, InstructionError, PlanError, visible
from megatron_pp.feature_table import FEATURES, SPEC_DEFAULTS
from megatron_pp.on_demand import load
from megatron_pp.plan.costs.files import read_text
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.io.torch_csv import read_torch_csv, write_torch_csv
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.feature import all_values, hooks_of
from megatron_pp.plan.ir.instruction import NONE, Instruction, batch, joined, unjoined
from megatron_pp.plan.ir.instruction_text import parse_instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.repeated import Line, Lines
from megatron_pp.plan.ir.spec import Plan, PlanSpec

JSON = "json"
TORCH_CSV = "torch-csv"
TORCH_CSV_COMMS = "torch-csv-comms"
TORCH_CSV_WAITS = "torch-csv-waits"  # the form of PyTorch 2.15
FORMATS = (JSON, TORCH_CSV, TORCH_CSV_COMMS, TORCH_CSV_WAITS)
_HEAD = "megatron_pp.plan"
_VERSION = 2
_EXPECTED = {"schedule": str, "pipeline_size": int, "num_chunks": int, "num_microbatches": int, "offload_chunks": int}
_MOST = 10**9  # no stage, chunk, microbatch or rank of a real plan is as large


def format_plan(plan: Plan, form: str, certified: bool = False) -> str:
    """The plan as text of one of FORMATS. Raises FileFormatError for others. ``certified``: JSON also has its
    certificate, if there is one. Nothing reads it back, because a file's claim is no proof.
    """
    if form == JSON:
        return _to_json(plan, certified)
    if form in FORMATS:
        return write_torch_csv(plan, comms=form != TORCH_CSV, waits=form == TORCH_CSV_WAITS)
    raise FileFormatError(f"plans are written as {', '.join(FORMATS)}, not as {form!r}")


def load_plan(path: str | os.PathLike[str], **lowering: Any) -> Plan:
    """Read a plan of any of FORMATS, unverified. ``lowering``: fields of PlanSpec (policy, channels, ...) for PyTorch's
    compute-only CSV. Raises FileFormatError for a file that holds no plan, PlanError for a plan that is incomplete or
    cannot run, naming the file, the place and what is wrong.
    """
    text = read_text(path)
    try:
        return parse_plan(text, **lowering)
    except PlanError as error:
        raise type(error)(f"{path}: {error}") from error


def parse_plan(text: str, **lowering: Any) -> Plan:
    """The plan in ``text``, as load_plan reads it."""
    if text.lstrip().startswith("{"):
        return _from_json(text)
    return read_torch_csv(text, **lowering)


class ComputeOf(Lines):
    """The compute orders of lowered programs, joined operations by themselves."""

    def __init__(self, programs: Sequence[Line]) -> None:
        super().__init__(len(programs))
        self.programs = programs

    def _make(self, rank: int) -> Line:
        return tuple(at for at in unjoined(self.programs[rank]) if at.op in ins.SINGLE_COMPUTE_OPS)


def _to_json(plan: Plan, certified: bool) -> str:
    content: dict[str, Any] = {
        "format": _HEAD,
        "version": _VERSION,
        "spec": spec_values(plan.spec),
        "placement": plan.placement.kind,
        **({"barriers": plan.placement.barriers} if plan.placement.barriers else {}),
        "remark": plan.remark,
    }
    if certified and plan.certificate is not None:
        content["certificate"] = plan.certificate.to_dict()
    if plan.orders != ComputeOf(plan.programs):
        content["orders"] = [[_node(at) for at in order] for order in plan.orders]
    head = json.dumps(content, indent=1)[:-2]
    lines = (",\n".join("   " + json.dumps(_node(at)) for at in program) for program in plan.programs)
    programs = ",\n".join(f"  [\n{line}\n  ]" for line in lines)  # an instruction a line: short, and good to compare
    return f'{head},\n "programs": [\n{programs}\n ]\n}}\n'


def _node(at: Instruction) -> dict[str, Any]:
    grouped = bool(at.members)
    stage, chunk = (None, None) if grouped else (at.stage, at.chunk)
    node: dict[str, Any] = {"op": at.op, "stage": stage, "chunk": chunk, "mb": None if at.mb == NONE else at.mb}
    if at.peer != NONE:
        node["peer"] = at.peer
    if at.part != NONE:
        node["slice"] = at.part
    if at.tensor:
        node["tensor"] = at.tensor
    if grouped:
        node["members"] = [_node(member) for member in at.members]
    return node


def _from_json(text: str) -> Plan:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"not a JSON file, or cut off: {error}") from error
    version = content.get("version")
    if content.get("format") != _HEAD or type(version) is not int or version != _VERSION:
        head = json.dumps({"format": _HEAD, "version": _VERSION})[1:-1]
        raise FileFormatError(f"no plan that this reads; it would hold {head}")
    if not isinstance(content.get("spec"), dict):
        raise FileFormatError("'spec' is missing or no object")
    try:
        spec = spec_from_values(content["spec"])
        kind = content.get("placement", "(missing)")
        barriers = content.get("barriers", 0)
        placement = placement_of(spec, kind, barriers)
    except ValueError as error:  # PlanError is one
        raise FileFormatError(str(error)) from error
    programs = _ranks(content, "programs", spec)
    orders = _ranks(content, "orders", spec) if "orders" in content else ComputeOf(programs)
    of_ranks = getattr(placement, "rank_chunks", [spec.num_chunks] * spec.pipeline_size)
    for rank, (program, chunks) in enumerate(zip(programs, of_ranks, strict=True)):
        if len(program) < chunks * spec.num_microbatches * spec.num_parts:
            slices = f" in {spec.num_parts} slices" if spec.num_parts > 1 else ""
            raise FileFormatError(
                f"rank {rank} has {len(program)} instructions for {chunks} chunk(s) of "
                f"{spec.num_microbatches} microbatches{slices}: the program is cut off, or the spec is another plan's"
            )
    return Plan(spec, placement, programs, orders, visible(str(content.get("remark", ""))))


def _ranks(content: dict[str, Any], what: str, spec: PlanSpec) -> tuple[Line, ...]:
    listed = content.get(what)
    if not isinstance(listed, list):
        raise FileFormatError(f"'{what}' is missing or no list with an entry per rank")
    if len(listed) != spec.pipeline_size:
        raise FileFormatError(f"there are {what} of {len(listed)} ranks; the pipeline has {spec.pipeline_size}")
    programs = []
    for rank, entry in enumerate(listed):
        try:
            if not isinstance(entry, list):
                raise InstructionError("a program is a list of instructions")
            programs.append(tuple(_instruction(node, f"instruction {k}") for k, node in enumerate(entry)))
        except InstructionError as error:
            raise FileFormatError(f"{what}, rank {rank}: {error}") from error
    return tuple(programs)


def _op(node: Any, where: str) -> str:
    op = node.get("op") if isinstance(node, dict) else None
    if not isinstance(op, str) or op not in ins.ALL_OPS:
        raise InstructionError(f"{where}: {str(node)[:60]} is no object with a known 'op'")
    return op


def _instruction(node: Any, where: str) -> Instruction:
    op = _op(node, where)
    if op in ins.GROUP_OPS:
        members = node.get("members")
        if not isinstance(members, list) or any(_op(member, where) in ins.GROUP_OPS for member in members):
            raise InstructionError(f"{where}: the 'members' of a {op} are a list of single instructions")
        inside = [_instruction(member, where) for member in members]
        if op == ins.BATCH:
            return batch(inside)
        try:
            return joined(op, inside)
        except InstructionError as error:
            raise InstructionError(f"{where}: {error}") from error
    tensor = node.get("tensor", "")
    if not isinstance(tensor, str):
        raise InstructionError(f"{where}: 'tensor' is {tensor!r}; it must be a name")
    at = Instruction(
        op,
        _number(node, "stage", where),
        NONE if op in ins.CHUNK_OPS else _number(node, "mb", where),
        _number(node, "peer", where) if op in ins.TRANSFER_OPS else NONE,
        _number(node, "chunk", where),
        _number(node, "slice", where) if "slice" in node else NONE,
        tensor,
    )
    if at.part != NONE or tensor:
        parse_instruction(str(at))  # refuses an op that takes none, and what is no name
    return at


def _number(node: dict[str, Any], key: str, where: str) -> int:
    value = node.get(key)
    if type(value) is not int or not 0 <= value < _MOST:
        raise InstructionError(f"{where} ({node['op']}): '{key}' is {value!r}; it must be a whole number of at least 0")
    return value


def placement_of(spec: PlanSpec, kind: str, barriers: int = 0) -> Placement:
    """The placement of ``spec``: a graph of modules if the spec has one. Raises ValueError as Placement does."""
    placement = Placement(kind, spec.pipeline_size, spec.num_chunks, barriers)
    of_graph: Placement = getattr(spec, "placement", placement)
    if (of_graph.kind, of_graph.barriers) != (kind, barriers):
        raise ValueError(f"a pipeline of several modules has no placement {kind!r} with {barriers} barriers")
    return of_graph


def spec_values(spec: PlanSpec) -> dict[str, Any]:
    """The fields of the spec, as JSON takes them."""
    values = spec.values()
    if "graph" in values:
        values["graph"] = values["graph"].to_dict()
    values["measured"] = None if spec.measured is None else all_values(spec.measured)
    has = dict(spec.added)
    for row in FEATURES:
        if not row.written and not any(name in has for name in row.spec):
            values = {name: value for name, value in values.items() if name not in row.spec}
    for hooks in hooks_of(spec.added):
        values = {name: hooks.to_file(name, value) for name, value in values.items()}
    return values


def spec_from_values(values: dict[str, Any]) -> PlanSpec:
    """The spec from the values in a file, as ``spec_values`` gives them. Raises FileFormatError, PlanError."""
    own = {f.name: f.default for f in fields(PlanSpec) if f.name != "added"}
    known = {**own, **SPEC_DEFAULTS}
    graph = values.pop("graph", None)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise FileFormatError(f"the spec has no field {unknown[0]!r}; its fields are {', '.join(known)}")
    missing = [name for name, default in known.items() if default is MISSING and name not in values]
    if missing:
        raise FileFormatError(f"the spec lacks {', '.join(missing)}")
    measured = values.pop("measured", None)
    for hooks in hooks_of((name, None) for name in values if name in SPEC_DEFAULTS):
        values = {name: hooks.from_file(name, value) for name, value in values.items()}
    for name, value in values.items():
        if name == "device" and isinstance(value, list):
            value = values[name] = tuple(value)
        expected = _EXPECTED.get(name) or type(known[name])
        if type(value) is not expected and (value is not None or known[name] is not None):
            raise FileFormatError(f"the spec's {name} is {value!r}; it must be of type {expected.__name__}")
        if isinstance(value, str) and not value.isprintable():
            raise FileFormatError(f"the spec's {name} is {value!r}; it holds a character that cannot be printed")
    if measured is not None and not isinstance(measured, dict):
        raise FileFormatError("the spec's 'measured' must be an object of measured values, or null")
    spec = PlanSpec(**values, measured=None if measured is None else Measured.from_dict(measured))
    return spec if graph is None else load("modules_file").spec_on(graph, spec)
