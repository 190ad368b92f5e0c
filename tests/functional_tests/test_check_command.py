"""``megatron-pp check`` as it is called, on the small Megatron script that parity's tests use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import PROJECT_ROOT
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = needs_megatron

SMALL = PROJECT_ROOT / "testkit" / "megatron" / "small_training"
PRETRAIN = str(SMALL / "pretrain.py")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    complaint: str

    @property
    def answer(self) -> dict[str, Any]:
        return json.loads(self.out)

    def findings(self, section: str, level: str = "") -> list[dict[str, Any]]:
        found = self.answer["sections"][section]["findings"]
        return [one for one in found if level in ("", one["level"])]


def check(command: str, folder: Path, **environment: str) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_pp", "check", *command.split()],
        env={**os.environ, "PYTHONPATH": f"{PROJECT_ROOT}:{SMALL}", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def test_flags_are_read_by_the_scripts_own_parser(tmp_path: Path) -> None:
    said = check(f"--gpus 4 --json {PRETRAIN} --num-layers 8 --pipeline-model-parallel-size 2 --lr 0.001", tmp_path)
    job = said.answer["job"]
    assert (job["framework"], job["gpus"], job["validated"]) == ("megatron", 4, True)
    assert job["given"] == {"num_layers": 8, "pipeline_model_parallel_size": 2, "lr": 0.001}
    assert job["args"]["data_parallel_size"] == 2
    assert job["spelling"]["num_layers"] == "--num-layers"
    assert not said.findings("start", "error")


def test_all_refusals_are_found_at_once(tmp_path: Path) -> None:
    """Of the parser and of each check, with the settings that each is about."""
    flags = "--num-layers 7 --pipeline-model-parallel-size 2 --global-batch-size 7 --micro-batch-size 2 --lr x --foo 3"
    said = check(f"--gpus 2 --json {PRETRAIN} {flags}", tmp_path)
    assert said.code == said.answer["exit_code"] == 1
    texts = [one["text"] for one in said.findings("start", "error")]
    for words in ("invalid float value: 'x'", "does not know --foo", "divisible by the stages", "divisible by 2"):
        assert any(words in text for text in texts), texts
    assert "num_layers" in next(one for one in said.findings("start") if "stages" in one["text"])["settings"]


def test_a_script_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    said = check("--gpus 2 nothing.py --num-layers 2", tmp_path)
    assert (said.code, said.out) == (2, "")
    assert said.complaint.startswith("megatron-pp check: nothing.py does not exist; check takes a script")
    assert json.loads(check("--gpus 2 --json nothing.py", tmp_path).out)["exit_code"] == 2
