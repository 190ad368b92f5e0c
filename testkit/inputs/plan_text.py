"""Finds, replaces and saves instructions of plans by their text, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.files import write_whole
from megatron_pp.plan.io.serialize import JSON, TORCH_CSV, format_plan
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.instruction_text import parse_program
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.verify.verifier import verify


def small_plan(schedule: str = "1f1b", p: int = 2, v: int = 1, m: int = 3, **options: Any) -> Plan:
    return build_plan(PlanSpec(schedule, p, v, m, **options))


def placed(placement: Placement, rank: int, text: str) -> tuple[Instruction, ...]:
    """The program of ``rank`` whose text is ``text``."""
    return placement.place(rank, parse_program(text))


def with_programs(plan: Plan, *lines: str) -> Plan:
    """``plan`` with these programs, one line per rank."""
    programs = (placed(plan.placement, rank, line) for rank, line in enumerate(lines))
    return replace(plan, programs=tuple(programs))


def edited(plan: Plan, rank: int, edit: str) -> Plan:
    """``plan`` with one change in the program of ``rank``. ``edit`` names instructions by their text: "drop A", "twice
    A", "swap A B", "move A before B", "move A behind B", "add A before B" or "A with mb=1 tensor=b".
    """
    program = list(plan.programs[rank])
    match edit.split():
        case ["add", one, "before", other]:
            program.insert(index_of(program, other), *placed(plan.placement, rank, one))
        case ["drop", one]:
            del program[index_of(program, one)]
        case ["twice", one]:
            program.insert(i := index_of(program, one), program[i])
        case ["swap", one, other]:
            i, j = index_of(program, one), index_of(program, other)
            program[i], program[j] = program[j], program[i]
        case ["move", one, ("before" | "behind") as where, other]:
            at = program.pop(index_of(program, one))
            program.insert(index_of(program, other) + (where == "behind"), at)
        case [one, "with", *fields]:
            i = index_of(program, one)
            values = dict(field.split("=") for field in fields)
            program[i] = program[i]._replace(**{n: int(v) if v.lstrip("-").isdigit() else v for n, v in values.items()})
        case _:
            raise ValueError(edit)
    return replace(plan, programs=(*plan.programs[:rank], tuple(program), *plan.programs[rank + 1 :]))


def refusal(plan: Plan, *device: str) -> str:
    """The message with which ``verify`` refuses ``plan``."""
    with pytest.raises(PlanError) as caught:
        verify(plan, device=device or None)
    return str(caught.value)


def rows(table: str) -> list[list[str]]:
    """The fields of each line, separated by ``|``. "#" begins a comment."""
    lines = [line for line in table.strip().splitlines() if not line.startswith("#")]
    return [[field.strip() for field in line.split("|")] for line in lines]


def index_of(program: Sequence[Instruction], text: str) -> int:
    """The index of the instruction whose text is ``text``."""
    return [str(at) for at in program].index(text)


def save_plan(plan: Plan, path: str | Path, form: str | None = None) -> None:
    """Write ``plan`` to ``path``, in the format of its ending unless ``form`` is given."""
    ending = Path(path).suffix.lstrip(".")
    write_whole(path, format_plan(plan, form or {"csv": TORCH_CSV, "json": JSON}.get(ending, ending)))
