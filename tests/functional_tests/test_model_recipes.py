"""Each recipe of examples/recipes, made small, trains Megatron-core's own GPTModel under `install()` on gloo ranks:
losses, gradients and parameters are those of Megatron's own schedule to the last bit.

The flags are the recipe's, except for those named here: sizes, the parallel layout, and flags that need a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.recipes import vlm_in_bubbles
from megatron_pp.tools.check.jobs.shell import read_shell
from megatron_pp.tools.flags.flags import Flags
from testkit.sweeps import drawn
from tests.functional_tests.megatron_support import assert_equal, beside_megatrons_schedule, needs_megatron

from testkit.megatron.cases import Job  # isort: skip
from testkit.megatron.recipes import SmallRecipe, flags_of, small_recipe  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
CHECKOUT = os.environ.get("MEGATRON_CHECKOUT", "")
BUBBLES = "tests.functional_tests.model_recipe_checks:encoders_in_the_bubbles"
RANKS = 8
SMALL = {
    # As in the recipe, the two copies of the embedding (E and m) are on two ranks.
    "deepseek_v3": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 2 "
    "--pipeline-model-parallel-layout Et*3|(tt|)*5m|L --num-layers 13 --moe-layer-freq ([0]*3+[1]*10)",
    "llama3_405b": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout E|(t|)*14L --num-layers 14",
    "llama3_70b_128k": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
    "--num-layers 40",
    "qwen3_235b_a22b": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
    "--expert-model-parallel-size 2",
}
"""The parallel layout on RANKS ranks: numbers of chunks, kinds of stages and all dimensions stay."""
DIMENSION, SHORT = "--{}-model-parallel-size", "--{}-parallel-size"
SIZES = {
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels"),
    *("--num-query-groups", "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim"),
    *("--v-head-dim", "--seq-length", "--max-position-embeddings", "--vocab-size", "--num-experts"),
    *("--moe-layer-freq", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-router-topk"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"),
    *("--micro-batch-size", "--global-batch-size", "--lr", "--train-iters"),
}
OTHERWISE = {
    "--bf16": ("on", "", "float32, in which one bit off is seen"),
    "--moe-grouped-gemm": ("on", "", "grouped products need Transformer Engine and a GPU"),
    "--recompute-modules": (
        "mla_up_proj mlp moe_act layernorm",
        "mla_up_proj mlp layernorm",
        "recomputation of experts' activation functions needs grouped products",
    ),
}
"""Further flags that differ from a recipe: the value there, the value here, and the reason."""


def small(name: str) -> SmallRecipe:
    return small_recipe(flags_of(RECIPES / f"{name}.sh"), SMALL[name].split(), RANKS)


def test_every_recipe_has_a_test() -> None:
    programs = {path.stem for path in RECIPES.glob("*.py") if path.stem != "__init__"}
    assert programs == {"packed_rl_update", "vlm_in_bubbles"}, "test_megatron_packing.py, and below"
    assert {path.stem for path in RECIPES.glob("*.sh")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_small_recipes_differ_in_sizes_and_gpu_settings_only(name: str) -> None:
    recipe = small(name)
    others = {flag: values for flag, values in recipe.changed().items() if flag not in SIZES}
    assert others == {flag: OTHERWISE[flag][:2] for flag in others}
    command = read_shell(str(RECIPES / f"{name}.sh"))
    assert command.launcher[-2:] == ["run", "--overlap-p2p-comm"], "so the policy of the case"
    assert recipe.case.policy == "overlap"
    for flag in ("tensor", "pipeline", "context", "expert"):
        given = recipe.given.number(DIMENSION.format(flag), recipe.given.number(SHORT.format(flag), 1))
        here = recipe.flags.number(DIMENSION.format(flag), recipe.flags.number(SHORT.format(flag), 1))
        assert (given > 1) == (here > 1), flag


@needs_megatron
@pytest.mark.parametrize("name", drawn(SMALL, 1))
def test_a_recipe_trains_as_under_megatrons_schedule(name: str, tmp_path: Path) -> None:
    case = small(name).case
    outcomes = beside_megatrons_schedule([case], tmp_path, CHECKOUT)
    assert_equal(outcomes[case])
    assert len(outcomes[case].losses) in (0, case.steps * case.microbatches)


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_CHECKOUT names no checkout of Megatron-LM")
@pytest.mark.parametrize("name", drawn(SMALL, 1))
def test_megatrons_own_script_reads_the_flags_and_trains_alike(name: str, tmp_path: Path) -> None:
    """`megatron-pp parity` runs it, makes the sizes small itself, and also compares with one process."""
    flags = Flags.read(flags_of(RECIPES / f"{name}.sh"))
    for flag, values in Flags.read(SMALL[name].split()).items:
        flags = flags.set(flag, " ".join(values))
    command = [sys.executable, "-W", "ignore", "-m", "megatron_pp", "parity", "--json", "--masks", "full"]
    command += ["--nproc", str(RANKS), "--deadline", "300", f"{CHECKOUT}/pretrain_gpt.py", *flags.words()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), CHECKOUT])}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False
    )
    said = json.loads(done.stdout)
    assert said["same"], said
    assert said["verdict"] in ("equal", "rounding"), said


def small_language() -> SmallRecipe:
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    return small_recipe(vlm_in_bubbles.LANGUAGE.split(), sizes, 4)


def test_only_sizes_of_the_vision_language_model_differ() -> None:
    assert set(small_language().changed()) <= SIZES | set(OTHERWISE)


@needs_megatron
def test_encoders_in_the_bubbles_have_the_gradients_of_a_model_without_a_pipeline() -> None:
    (outcome,) = run_jobs([Job(small_language().case, check=BUBBLES, deadline=200.0)])
    assert outcome.status == "ok", outcome.message
    assert all(compared > 10 for compared in outcome.facts)
