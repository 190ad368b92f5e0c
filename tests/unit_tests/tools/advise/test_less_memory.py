"""With more memory the answer of ``advise`` is not slower. Times in another unit give the same plan. No step is shorter
than its bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_pp.planner.bound import Bound
from megatron_pp.tools.advise.less_memory import limit_below
from megatron_pp.tools.cli.command_line import main
from testkit.sweeps import EXHAUSTIVE, drawn

COSTS = {"activation-gb": 1.3, "static-gb": 2.3, "forward-ms": 2.8, "backward-ms": 0.779, "weight-ms": 0.631}
LESS_MEMORY = COSTS | {"p2p-ms": 0.6, "max-chunks": 1, "schedules": "auto"}
OTHER_UNIT = {"activation-gb": 2.4, "forward-ms": 2.028, "backward-ms": 2.322, "weight-ms": 1.4, "p2p-ms": 0.3}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder for the test, as the command writes the costs of a search there."""
    monkeypatch.chdir(tmp_path)


def recommended(capsys: pytest.CaptureFixture[str], unit: float = 1.0, **options: Any) -> Any:
    words: list[str] = []
    for name, value in options.items():
        name = name.replace("_", "-")
        words += [f"--{name}", repr(value * unit) if name.endswith("-ms") else str(value)]
    code = main(["advise", "-P", "4", "--global-batch", "9", "--jobs", "1", "--json", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)["recommended"]


@pytest.mark.parametrize(
    ("memory", "below"),
    [
        (6.3, 6.2),
        (6.25, 6.2),
        (6.0, 5.9),
        (1.0, 0.99),
        (10.2, 10.0),
        (10.0, 9.9),
        (80.0, 79.0),
        (0.5, 0.49),
        (123, 120),
    ],
)
def test_limits_have_two_digits(memory: float, below: float) -> None:
    assert limit_below(memory) == below


@pytest.mark.slow
@pytest.mark.parametrize(("less", "more"), [(6, 6.3), *([(6.3, 6.6)] if EXHAUSTIVE else [])])
def test_more_memory_gives_no_slower_answer(less: float, more: float, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [recommended(capsys, memory_gb=gb, **LESS_MEMORY)["step_ms"] for gb in (less, more)]
    assert steps[1] <= steps[0] * 1.002


@pytest.mark.slow
@pytest.mark.parametrize("unit", drawn([3.0, 0.01], 1))
def test_times_in_another_unit_give_the_same_plan(unit: float, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"memory_gb": 12, "max-chunks": 2, "schedules": "auto_v", **OTHER_UNIT}
    first, other = (recommended(capsys, one, **given) for one in (1.0, unit))
    assert other["step_ms"] / unit == pytest.approx(first["step_ms"], rel=1e-9)
    assert other["memory_gb"] == pytest.approx(first["memory_gb"], rel=1e-9)
    for one in (first, other):
        assert one["bound_ms"] <= one["step_ms"]


def test_a_bound_is_not_above_the_step_by_rounding() -> None:
    step = 0.1 + 0.2
    assert Bound(step * (1 + 1e-15), "work of rank 0", ()).of_step(step).step == step
    assert Bound(step * 0.5, "work of rank 0", ()).of_step(step).step == step * 0.5
    assert Bound(step * 2, "work of rank 0", ()).of_step(step).step == step * 2  # a wrong bound is not hidden
