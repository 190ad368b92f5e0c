"""``megatron-pp parity`` on a script of Megatron-core's: layouts that are right, and a planted fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

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


def parity(*words: str, options: str = "", cwd: Path | None = None) -> tuple[int, dict[str, Any]]:
    """Exit code, and the object on standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_pp", "parity", "--json", *options.split(), *words],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout.count("\n") == 1, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def test_a_pipeline_with_chunks_is_right_under_both_schedules() -> None:
    flags = f"{FLAGS} {CHUNKS} --untie-embeddings-and-output-weights --clip-grad 0"
    code, said = parity(str(SCRIPTS / "pretrain_gpt_megatron.py"), *flags.split())
    assert code == 0, said
    assert (said["first"], said["repeat"]) == (None, None)
    assert said["engines"] == {"megatron": "rounding", "ours": "rounding"}, "a norm adds up in the order of ranks"
    assert said["exact"] == ["forward", "loss", "backward", "gradient", "parameter"]
    assert said["same"] is True
    assert "--num-layers: 16 -> 4" in said["shrunk"]
    assert said["compared"] > 100


def test_tensor_parallelism_and_sharded_optimizers_are_right_within_rounding() -> None:
    flags = f"{FLAGS} --tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --bf16"
    code, said = parity(str(SCRIPTS / "pretrain_gpt_megatron.py"), *flags.split(), options="--engine ours")
    assert (code, said["verdict"], said["parameters"]) == (0, "rounding", {})
    assert said["notes"] == ["--bf16: compared in float32"]


def test_a_loop_of_its_own_has_no_checkpoints_that_parity_knows() -> None:
    code, said = parity(str(SCRIPTS / "pretrain_gpt_megatron.py"), *FLAGS.split()[2:], options="--checkpoint all")
    assert (code, said["verdict"]) == (2, None)
    assert "Megatron's own training loop only" in said["error"]


def test_a_tied_embedding_that_is_not_synchronised(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNSYNCHRONISED.format(script=str(SCRIPTS / "pretrain_gpt_megatron.py")))
    flags = f"{FLAGS} {CHUNKS} --calculate-per-token-loss"
    options = "--junit parity.xml --html parity.html --engine both"
    code, said = parity("train.py", *flags.split(), options=options, cwd=tmp_path)
    assert (code, said["verdict"]) == (1, "different")
    assert said["first"]["name"] == "embedding.word_embeddings.weight"
    assert "gradient" in said["first"]["operation"]
    assert said["dimension"] == "PP"
    assert said["smallest"] == "PP 2"
    assert said["whose"] == "model"
    assert said["parameters"]["embedding.word_embeddings.weight"]["partial_sums"] == "PP"
    assert Xml.parse(tmp_path / "parity.xml").getroot().get("failures") == "2"
    assert "<svg" in (tmp_path / "parity.html").read_text()
