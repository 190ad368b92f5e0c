"""Plans by their printed instructions: finding, replacing and saving them in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.files import write_whole
from megatron_pp.plan.io.serialize import JSON, TORCH_CSV, format_plan
from megatron_pp.plan.ir.instruction import Instruction, parse_program
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec


def small_plan(schedule: str = "1f1b", p: int = 2, v: int = 1, m: int = 3, **options: Any) -> Plan:
    return build_plan(PlanSpec(schedule, p, v, m, **options))


def placed(placement: Placement, rank: int, text: str) -> tuple[Instruction, ...]:
    """The program that ``text`` prints, on ``rank``."""
    return placement.place(rank, parse_program(text))


def with_programs(plan: Plan, *lines: str) -> Plan:
    """``plan`` with these programs, one line per rank."""
    programs = (placed(plan.placement, rank, line) for rank, line in enumerate(lines))
    return replace(plan, programs=tuple(programs))


def without(plan: Plan, rank: int, text: str) -> Plan:
    """``plan`` without the first instruction of ``rank`` that prints as ``text``."""
    program = plan.programs[rank]
    index = index_of(program, text)
    programs = (*plan.programs[:rank], program[:index] + program[index + 1 :], *plan.programs[rank + 1 :])
    return replace(plan, programs=programs)


def index_of(program: Sequence[Instruction], text: str) -> int:
    """Where the instruction that prints as ``text`` stands."""
    return [str(at) for at in program].index(text)


def save_plan(plan: Plan, path: str | Path, form: str | None = None) -> None:
    """Write ``plan`` to ``path``, in the format of its ending unless ``form`` is given."""
    ending = Path(path).suffix.lstrip(".")
    write_whole(path, format_plan(plan, form or {"csv": TORCH_CSV, "json": JSON}.get(ending, ending)))
