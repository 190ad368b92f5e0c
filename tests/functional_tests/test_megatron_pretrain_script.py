"""scripts/pretrain_gpt_megatron.py: Megatron-core's GPT trained on real text, in step with Megatron's own schedule."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest

from tests.functional_tests.megatron_support import SCRIPTS, in_megatrons_process, needs_megatron

from testkit.megatron.cases import Case  # isort: skip

pytestmark = needs_megatron


def test_the_small_training_has_equal_losses_under_both_engines() -> None:
    flags = (
        "--num-layers 4 --hidden-size 32 --seq-length 16 --train-iters 3 --num-experts 2 --hidden-dropout 0.1 --compare"
    )
    result = subprocess.run(
        [str(SCRIPTS / "pretrain_gpt_megatron.sh"), *flags.split()],
        env={**os.environ, "PP": "2", "VP": "2", "MEGATRON_PP_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    steps = re.findall(r"lm loss (\S+)  megatron's (\S+)  largest gradient difference (\S+)", result.stdout)
    assert len(steps) == 3
    assert all(ours == theirs and float(difference) == 0 for ours, theirs, difference in steps), result.stdout
    losses = [float(ours) for ours, _, _ in steps]
    assert losses[2] < losses[1] < losses[0], "it learns"


def impossible_flags(case: Case) -> tuple[Any, str]:
    """Return the exit code and error output of the script, in a process that has already loaded Megatron-core."""
    script = str(SCRIPTS / "pretrain_gpt_megatron.py")
    said = io.StringIO()
    with (
        patch.object(sys, "argv", [script, "--global-batch-size", "3", "--micro-batch-size", "2"]),
        patch.dict(os.environ, {"WORLD_SIZE": "1"}),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(script, run_name="__main__")
    return ended.value.code, said.getvalue()


def test_impossible_flags_are_reported() -> None:
    code, said = in_megatrons_process(impossible_flags)
    assert code == 2
    assert "--global-batch-size 3 is not a multiple of 2" in said
