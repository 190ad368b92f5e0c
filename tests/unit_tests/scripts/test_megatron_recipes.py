"""scripts/megatron_recipes.py: which recipes it finds, which share a run, and whose a failure is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

recipes = pytest.importorskip("megatron_recipes", reason="PyYAML is not installed")

SIZES = "--num-layers: 8\n  --hidden-size: 64\n  --num-attention-heads: 4\n"
STAGES = "--pipeline-model-parallel-size: "
CASES = {
    "gpt/two": SIZES + f"  {STAGES}2\n  --bf16: true\n  --swiglu: true\n  --mmap: false\n",
    "gpt/two_resumed": SIZES + f"  {STAGES}2\n  --bf16: true\n  --swiglu: true\n  --save-interval: 50\n",
    "gpt/one": SIZES + f"  {STAGES}1\n",
    "gpt/inference_of_two": SIZES + f"  {STAGES}2\n",
    "bert/four": SIZES + f'  {STAGES}4\n  --hierarchical-context-parallel-sizes: "[2 2]"\n',
    "moe/large": SIZES + f"  {STAGES}4\n  --num-experts: 64\n  --expert-model-parallel-size: 16\n",
}


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    for name, text in CASES.items():
        folder = tmp_path / recipes.CASES / name
        folder.mkdir(parents=True)
        (folder / "model_config.yaml").write_text(f"MODEL_ARGS:\n  {text}TEST_TYPE: regular\n")
    return tmp_path


def test_recipes_with_a_pipeline_are_read_as_megatron_reads_them(megatron: Path) -> None:
    found = {one.name: one for one in recipes.recipes_of(megatron)}
    assert set(found) == set(CASES) - {"gpt/one"}
    two, bert = found["gpt/two"].flags, found["bert/four"]
    assert "--swiglu" in two
    assert two.text("--swiglu") == ""
    assert "--mmap" not in two
    assert (bert.script, bert.flags.text("--hierarchical-context-parallel-sizes")) == (
        "examples/bert/pretrain_bert.py",
        "2 2",
    )
    assert found["moe/large"].flags.number("--expert-model-parallel-size", 0) == 4, "16 processes, not 64"
    assert [name for name, one in found.items() if not one.trains] == ["gpt/inference_of_two"]


def test_recipes_that_are_the_same_once_they_are_small_share_a_run(megatron: Path) -> None:
    found = {one.name: one.key() for one in recipes.recipes_of(megatron)}
    assert found["gpt/two"] == found["gpt/two_resumed"]
    assert len(set(found.values())) == 4


@pytest.mark.parametrize(
    ("both", "theirs", "result"),
    [
        ({"verdict": "equal", "same": True}, {}, recipes.SAME),
        ({"verdict": "rounding", "same": False}, {}, recipes.OTHER_BITS),
        ({"verdict": None, "error": "ours"}, {"verdict": "equal"}, recipes.OURS),
        ({"verdict": None, "error": "ours"}, {"verdict": None, "error": "a\ntheirs"}, recipes.MEGATRON),
    ],
)
def test_a_recipes_failure_is_attributed_to_an_engine(
    megatron: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, both: Any, theirs: Any, result: str
) -> None:
    said = {"engines": {"megatron": "equal"}, "layout": "PP 2"}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        answer = both if command[command.index("--engine") + 1] == "both" else theirs
        return subprocess.CompletedProcess(command, 0, json.dumps({**said, **answer}), "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["", "--megatron", str(megatron), "--only", "gpt/two"])
    assert recipes.main() == int(result in (recipes.OTHER_BITS, recipes.OURS))
    printed = capsys.readouterr().out
    assert f"2 of 2: {result}" in printed
    assert ("theirs" in printed) == (result == recipes.MEGATRON)
    assert ("| ours" in printed) == (result == recipes.OURS)


def test_an_interrupted_table_goes_on_with_what_is_left_or_failed(
    megatron: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def outcome_of(recipe: Any, *_: Any) -> Any:
        asked.append(recipe.name)
        if recipe.name == "moe/large" and len(asked) < 5:
            raise KeyboardInterrupt
        return recipes.Outcome(recipes.OURS if recipe.name == "bert/four" and len(asked) < 5 else recipes.SAME)

    table = tmp_path / "table.csv"
    monkeypatch.setattr(recipes, "outcome_of", outcome_of)
    monkeypatch.setattr(sys, "argv", ["", "--megatron", str(megatron), "--csv", str(table)])
    with pytest.raises(KeyboardInterrupt):
        recipes.main()
    asked.clear()
    asked.extend([""] * 5)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    assert recipes.main() == 0
    assert set(asked[5:]) == {"bert/four", "moe/large"}
    assert len(table.read_text().splitlines()) == len(CASES) - 1 + 1, "a header, and all but gpt/one"
