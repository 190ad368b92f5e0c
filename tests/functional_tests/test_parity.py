"""``megatron-pp parity`` on a script that uses Megatron-core: right layouts, and a planted fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest

from testkit.megatron.parity_commands import run_parity
from tests.conftest import PROJECT_ROOT
from tests.functional_tests.megatron_support import SCRIPTS, needs_megatron

pytestmark = needs_megatron

FLAGS = "--engine megatron --num-layers 16 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --train-iters 9"
CHUNKS = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
UNSYNCHRONISED = """
import runpy, sys
from megatron.core.distributed import finalize_model_grads

finalize_model_grads.__globals__["_allreduce_word_embedding_grads"] = lambda *args, **kwargs: None
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
TENSOR = "--tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --bf16"
FILES = "--junit parity.xml --html parity.html"
COMMANDS = {
    "chunks": f"SCRIPT {FLAGS} {CHUNKS} --untie-embeddings-and-output-weights --clip-grad 0",
    "tensor": f"--engine ours SCRIPT {FLAGS} {TENSOR}",
    "own loop": f"--checkpoint all SCRIPT {FLAGS.removeprefix('--engine megatron ')}",
    "fault": f"{FILES} --engine both train.py {FLAGS} {CHUNKS} --calculate-per-token-loss",
}
Answers = dict[str, tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    """Return for each command its exit code and the object on standard output. Only the first command starts an
    interpreter, since importing Megatron-core takes as long as the computation of a command."""
    script = str(SCRIPTS / "pretrain_gpt_megatron.py")
    (folder / "train.py").write_text(UNSYNCHRONISED.format(script=script))
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)}
    found = {}
    for name, command in COMMANDS.items():
        words = [script if word == "SCRIPT" else word for word in ["--json", *command.split()]]
        if found:
            done = run_parity(words, folder, environment)
        else:
            interpreter = [sys.executable, "-m", "megatron_pp", "parity", *words]
            done = subprocess.run(
                interpreter, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
            )
        assert done.stdout.count("\n") == 1, done.stderr[-3000:]
        assert "Warning" not in done.stderr, "of the libraries that the script imports"
        found[name] = done.returncode, json.loads(done.stdout)
    return found


def test_a_pipeline_with_chunks_is_right_under_both_schedules(answers: Answers) -> None:
    code, said = answers["chunks"]
    assert code == 0, said
    assert (said["first"], said["repeat"]) == (None, None)
    assert said["engines"] == {"megatron": "rounding", "ours": "rounding"}, "a norm adds up in the order of ranks"
    compared = {"forward", "loss", "backward", "gradient", "parameter", "report", "schedule", "optimizer's exp_avg"}
    assert compared <= set(said["exact"])
    assert said["rounding"].startswith("gradient norm, step 0 (each stage adds up the squares of its own gradients")
    assert said["same"] is True
    assert "--num-layers: 16 -> 4" in said["shrunk"]
    assert said["compared"] > 100


def test_tensor_parallelism_and_sharded_optimizers_are_right_within_rounding(answers: Answers) -> None:
    code, said = answers["tensor"]
    assert (code, said["verdict"], said["parameters"]) == (0, "rounding", {})
    assert said["notes"] == ["--bf16: compared in float32"]


def test_parity_does_not_compare_checkpoints_of_a_custom_loop(answers: Answers) -> None:
    code, said = answers["own loop"]
    assert (code, said["verdict"]) == (2, None)
    assert "Megatron's own training loop only" in said["error"]


def test_a_tied_embedding_that_is_not_synchronised(answers: Answers, folder: Path) -> None:
    code, said = answers["fault"]
    assert (code, said["verdict"]) == (1, "different")
    assert said["first"]["name"] == "embedding.word_embeddings.weight"
    assert "gradient" in said["first"]["operation"]
    assert said["dimension"] == "PP"
    assert said["smallest"] == "PP 2"
    assert said["whose"] == "model"
    assert said["whose_in_words"] == "outside the schedule: Megatron's layers or your script"
    assert said["parameters"]["embedding.word_embeddings.weight"]["partial_sums"] == "PP"
    assert Xml.parse(folder / "parity.xml").getroot().get("failures") == "2"
    assert "<svg" in (folder / "parity.html").read_text()
