"""Exit codes: 0 done, 1 the plan is refused, 2 no plan or wrong arguments. They are the same for all commands and all
kinds of refusals."""

from __future__ import annotations

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.io.serialize import JSON, format_plan
from megatron_pp.plan.ir.spec import ON_NCCL, PlanSpec
from testkit.inputs.plan_text import edited

ORDER = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
PLAN = build_plan(PlanSpec("1f1b", 2, 1, 2, device=ON_NCCL))
WHOLE = format_plan(PLAN, JSON)
FILES = {  # name: (content, exit code)
    "good.csv": (ORDER, 0),
    "good.json": (WHOLE, 0),
    "incomplete.csv": (ORDER.replace("0B1", ""), 1),
    "twice.csv": (ORDER.replace("0F1", "0F0"), 1),
    "backwards.csv": (ORDER.replace("0F0", "x").replace("0B0", "0F0").replace("x", "0B0"), 1),
    "stuck.csv": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", 1),
    "no_wait.json": (format_plan(edited(PLAN, 0, "drop FREE_F0.1"), JSON), 1),
    "no_receive.json": (format_plan(edited(PLAN, 1, "drop RECV_F0.0"), JSON), 1),
    "noise.csv": ("red,green\n", 2),
    "empty.csv": ("", 2),
    "elsewhere.csv": (ORDER.replace("1F1", "5F1"), 2),
    "cut.json": (WHOLE[: len(WHOLE) // 2], 2),
    "other.json": ('{"format": "other"}', 2),
    "no_sizes.json": (WHOLE.replace('"pipeline_size": 2', '"pipeline_size": 0'), 2),
    "missing.csv": (None, 2),
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, (content, _) in FILES.items():
        if content is not None:
            (tmp_path / name).write_text(content)


@pytest.mark.parametrize(
    "line", ["verify", "simulate", "simulate --json", "draw", "draw --style grid", "draw -o a.svg"]
)
@pytest.mark.parametrize("way", ["-s", "--import"])
@pytest.mark.parametrize("name", FILES)
def test_the_code_depends_on_the_file_alone(command, name, way, line):
    code, out, err = command(*line.split(), way, name)
    assert code == FILES[name][1], out + err
    if code:
        said = out + err
        assert said.count("\n") == 1
        assert ("refused: " in said) == (code == 1)
        assert bool(out) == (code == 1 and line == "verify")  # for verify the refusal is the answer


@pytest.mark.parametrize("name", FILES)
def test_plan_prints_what_can_be_read_and_run(command, name):
    """A whole plan is printed unchanged; it is not verified."""
    expected = 0 if name in ("no_wait.json", "no_receive.json") else FILES[name][1]
    code, out, err = command("plan", "--import", name)
    assert (code, bool(out), err.count("\n")) == (expected, expected == 0, int(expected != 0))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", 0),  # the help
        ("simulate --compare 1f1b,gpipe", 0),
        ("simulate --compare 1f1b --layers 3 --hidden-size 8 --seq-length 8", 1),  # 3 layers on 4 ranks
        ("simulate --compare 1f1b --layers 4 --hidden-size 8 --seq-length 8 --memory-limit 0", 1),
    ],
)
def test_codes_of_arguments_and_comparisons(command, line, expected):
    assert command(*line.split())[0] == expected
