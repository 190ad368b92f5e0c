"""scripts/check_recipes.py: which recipes it finds, what ran, and what the recorded table has."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT_ROOT

check_recipes = pytest.importorskip("check_recipes", reason="PyYAML is not installed")

SIZES = "--num-layers: 8\n  --hidden-size: 64\n  --num-attention-heads: 4\n"
FILES = {
    "gpt/two": SIZES + "  --pipeline-model-parallel-size: 2\n  --hierarchical-context-parallel-sizes: 2 2\n",
    "gpt/one": SIZES + "  --pipeline-model-parallel-size: 1\n",
    "moe/large": SIZES
    + "  --pipeline-model-parallel-size: 4\n  --num-experts: 64\n  --expert-model-parallel-size: 16\n",
}


def test_recipes_with_a_pipeline_are_found_with_the_gpus_that_they_need(tmp_path: Path) -> None:
    for name, text in FILES.items():
        folder = tmp_path / check_recipes.CASES / name
        folder.mkdir(parents=True)
        (folder / "model_config.yaml").write_text(f"MODEL_ARGS:\n  {text}", encoding="utf-8")
    found = {recipe.name: recipe for recipe in check_recipes.recipes_of(tmp_path)}
    assert {name: recipe.gpus for name, recipe in found.items()} == {"gpt/two": 8, "moe/large": 64}
    assert found["gpt/two"].words[-3:] == ("--hierarchical-context-parallel-sizes", "2", "2")


def test_recorded_results_tell_equal_different_and_not_run_apart() -> None:
    ran = check_recipes.what_ran()
    assert len(ran) == 148
    assert {"yes", "differs", "not trained", "not run"} == {*ran.values()}
    assert ran["gpt/gpt3_mcore_te_tp2_pp2_mla"] == "yes"
    assert ran["moe/gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel"] == "differs"


def test_the_recorded_table_has_no_false_error() -> None:
    with (PROJECT_ROOT / "docs" / "data" / "check_recipes.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == check_recipes.COLUMNS
    trained = [name for name, ran in check_recipes.what_ran().items() if ran != check_recipes.NOT_TRAINED]
    assert [row[0] for row in rows[1:]] == sorted(trained)
    assert check_recipes.false_errors(rows[1:]) == []


@pytest.mark.skipif(
    not (Path(os.environ.get("MEGATRON_CHECKOUT", "-")) / check_recipes.CASES).is_dir(),
    reason="MEGATRON_CHECKOUT names no checkout of Megatron-LM with its functional tests",
)
def test_recipes_of_a_checkout_have_no_false_error() -> None:
    command = [sys.executable, str(PROJECT_ROOT / "scripts" / "check_recipes.py"), "--megatron"]
    command += [os.environ["MEGATRON_CHECKOUT"], "--only", "tp2_pp2_mla", "pp4_vp2", "deepseekv3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "ran: yes, no error" in done.stdout
