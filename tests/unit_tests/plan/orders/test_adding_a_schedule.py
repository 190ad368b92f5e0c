"""docs/adding_a_schedule.md: both ways of adding a schedule work as they stand there."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.orders import SCHEDULES, register
from megatron_pp.plan.orders.family import Family
from megatron_pp.tools.cli.command_line import main
from testkit.pages import code_blocks

PAGE = "docs/adding_a_schedule.md"
EXACT = "largest difference to one process: 0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in {**code_blocks(PAGE), **code_blocks(PAGE, "csv")}.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    for name in [*SCHEDULES]:
        monkeypatch.setitem(SCHEDULES, name, SCHEDULES[name])
    return tmp_path


def _printed(script: Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def test_the_page_registers_a_schedule_of_its_own(folder: Path) -> None:
    try:
        printed = _printed(folder / "by_code.py")
    finally:
        added = SCHEDULES.pop("1f1b_one_more", None)
    assert added is not None
    found = re.findall(r"(\S+): (\S+) slots, at most (\d+) microbatches in flight\n", printed)
    plain, more = ((float(slots), int(peak)) for _, slots, peak in found)
    assert more[0] < plain[0], "it hides transfers"
    assert more[1] == plain[1] + 1
    assert printed == code_blocks(PAGE, "text")["block1"], "the page says what it prints"


def test_the_page_runs_a_schedule_file(folder: Path) -> None:
    assert _printed(folder / "by_file.py") == EXACT


@pytest.mark.parametrize("command", ["verify", "draw", "simulate"])
def test_the_commands_for_a_file(folder: Path, command: str) -> None:
    lines = code_blocks(PAGE, "bash")["block1"].splitlines()
    [arguments] = [line.split()[1:] for line in lines if line.startswith(f"megatron-pp {command}")]
    assert main(arguments) == 0


def test_registering_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(PlanError, match="exists already"):
        register(Family("1f1b", lambda shape: [], source="", summary=""))
