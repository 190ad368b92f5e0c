"""scripts/pretrain_gpt_megatron.py: Megatron-core's GPT trained on real text, in step with Megatron's own schedule."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.functional_tests.megatron_support import SCRIPTS, needs_megatron

pytestmark = needs_megatron


def test_both_engines_train_alike() -> None:
    flags = (
        "--num-layers 4 --hidden-size 32 --seq-length 16 --train-iters 3 --num-experts 2 --hidden-dropout 0.1 --compare"
    )
    result = subprocess.run(
        [str(SCRIPTS / "pretrain_gpt_megatron.sh"), *flags.split()],
        env={**os.environ, "PP": "2", "VP": "2", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    steps = re.findall(r"lm loss (\S+)  megatron's (\S+)  largest gradient difference (\S+)", result.stdout)
    assert len(steps) == 3
    assert all(ours == theirs and float(difference) == 0 for ours, theirs, difference in steps), result.stdout
    losses = [float(ours) for ours, _, _ in steps]
    assert losses[2] < losses[1] < losses[0], "it learns"


def test_impossible_flags_are_said() -> None:
    result = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "pretrain_gpt_megatron.py"),
            "--global-batch-size",
            "3",
            "--micro-batch-size",
            "2",
        ],
        env={**os.environ, "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "--global-batch-size 3 is not a multiple of 2" in result.stderr
