"""Layers from Transformer Engine, and norms and the optimizer from apex: which are chosen, and how they are called. The
layers are Transformer Engine's own on the CPU, and a stand-in replaces apex. Tests at the end use both unchanged if
there is a GPU.

The program runs in its own process, which claims to have a GPU.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.gpt import checkpoint, libraries, program
from testkit.processes import run_processes
from testkit.stand_ins.standin_libraries import transformer_engine_for_training, write
from testkit.train_flags import SMALL_MODEL
from tests.functional_tests.test_train_script import ROOT, TEXT, losses

SIZES = [*SMALL_MODEL, "--num-layers", "2", "--num-microbatches", "3", "--train-steps", "2", "--warmup-steps", "1"]
SIZES += ["--no-plot", "--eval-interval", "0", "--data", str(TEXT), "--validation-fraction", "0.2"]
TE = ["--transformer-impl", "transformer_engine"]
RUNS: dict[str, list[str]] = {
    "torch": ["--norm-impl", "torch", "--optimizer-impl", "torch"],
    "auto": [],
    "whole": ["--norm-impl", "apex", "--optimizer-impl", "apex", "--train-steps", "4", "--save-interval", "2"],
    "resumed": [],
    "te": [*TE, "--optimizer-impl", "torch"],
    "te split": [*TE, "--optimizer-impl", "torch", "--pipeline-schedule", "zb_h1"],
    "te fp8": [*TE, "--fp8", "hybrid", "--pipeline-schedule", "zb_v"],
    "te fp8 checkpointed": [*TE, "--fp8", "e4m3", "--num-microbatches-with-partial-activation-checkpoints", "0"],
    "no recipe": [*TE, "--fp8", "hybrid", "--fp8-recipe", "mxfp8"],
    "norms of another": [*TE, "--norm-impl", "apex"],
}


class Claimed:
    """A device that claims to be a GPU, on which "auto" looks for fused libraries; its tensors stay on the CPU."""

    type = "cuda"


class OnCPU(libraries.TransformerEngineParts):
    def __init__(self, te: Any, device: Any, *more: Any) -> None:
        super().__init__(te, torch.device("cpu"), *more)


class Writer(checkpoint._Writer):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.per_thread_copy_ahead = 0  # it copies by a GPU's streams


def train_all(rank: int, size: int, folder: Path, runs: dict[str, list[str]]) -> dict[str, Any]:
    """Return for each run its exit code, calls of Transformer Engine's layers, output and losses."""
    os.chdir(folder)
    sys.path.insert(0, str(write(folder / "path")))
    choose, found = libraries.choose_libraries, {}
    program.choose_libraries = lambda settings, device, split: choose(settings, Claimed(), split)  # type: ignore[arg-type]
    libraries.TransformerEngineParts, checkpoint._Writer = OnCPU, Writer  # type: ignore[misc]
    with transformer_engine_for_training() as noted:
        del importlib.import_module("transformer_engine.common.recipe").MXFP8BlockScaling  # as before 2.1
        for name, flags in runs.items():
            noted.calls.clear()
            with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as errors:
                code = program.main(flags)
            result = {"code": code, "calls": [*noted.calls], "said": said.getvalue().splitlines()}
            taken = losses(folder / (name if name != "resumed" else "whole")) if code == 0 else []  # at this moment
            found[name] = {**result, "losses": taken, "errors": errors.getvalue()}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("libraries")
    runs = {name: [*SIZES, *flags, "--run-dir", str(folder / name)] for name, flags in RUNS.items()}
    runs["resumed"] = ["--resume", str(folder / "whole" / "checkpoints" / "step-00000002")]
    options = {"backend": None, "timeout": 300.0, "start_method": "forkserver"}
    return run_processes(train_all, 1, (folder, runs), **options)[0]  # type: ignore[arg-type]


def test_the_log_names_the_libraries_in_use(results: dict[str, Any]) -> None:
    expected = {
        "torch": ["layers: torch; norms: torch LayerNorm", "optimizer: torch AdamW (fused=True)"],
        "auto": ["layers: torch; norms: apex FusedLayerNorm", "optimizer: apex FusedAdam"],
        "whole": ["layers: torch; norms: apex FusedLayerNorm", "optimizer: apex FusedAdam"],
        "te": ["layers: Transformer Engine 2.20.2 (no FP8)", "optimizer: torch AdamW (fused=True)"],
        "te fp8": ["layers: Transformer Engine 2.20.2 (FP8 hybrid, delayed scaling)", "optimizer: apex FusedAdam"],
    }
    for name, lines in expected.items():
        assert results[name]["code"] == 0
        assert results[name]["said"][2:4] == lines, name
    assert results["te"]["said"][4].startswith("backward: whole")
    assert "6 do so themselves" in results["te split"]["said"][4]


def test_all_libraries_take_the_steps_of_torchs_layers(results: dict[str, Any]) -> None:
    """The steps are not equal to the last bit: additions are in a different order, and Transformer Engine's GELU is the
    tanh form."""
    expected = results["torch"]["losses"]
    assert len(expected) == 2
    for name in ("auto", "te", "te split", "te fp8", "te fp8 checkpointed"):
        assert results[name]["losses"] == pytest.approx(expected, rel=1e-4), name
    # apex counts steps per group of parameters, and checkpoints do not hold these counts.
    assert (results["resumed"]["code"], len(results["whole"]["losses"])) == (0, 4)
    assert results["resumed"]["losses"] == results["whole"]["losses"]


def test_under_fp8_alone_the_first_microbatch_of_each_step_is_marked(results: dict[str, Any]) -> None:
    """Two layers have three modules each. A run has a validation, two steps of three microbatches, and a validation."""
    assert {(first, fp8) for _, first, fp8 in results["te"]["calls"]} == {(None, None)}
    for name, recipe in {"te fp8": "DelayedScaling HYBRID", "te fp8 checkpointed": "DelayedScaling E4M3"}.items():
        calls = results[name]["calls"]
        assert {fp8 for _, _, fp8 in calls} == {recipe}
        assert sum(first for kind, first, _ in calls if kind == "Linear") == 2 * (1 + 2 + 1)
    assert sum(kind == "LayerNormLinear" for kind, *_ in results["te fp8"]["calls"]) == 2 * (3 + 2 * 3 + 3)


def test_impossible_library_settings_are_refused_before_the_run_begins(results: dict[str, Any]) -> None:
    sentences = {
        "no recipe": "--fp8-recipe is mxfp8, which this release of Transformer Engine does not have; it has delayed",
        "norms of another": "--norm-impl is apex, but --transformer-impl transformer_engine has its own norms",
    }
    for name, sentence in sentences.items():
        assert (results[name]["code"], results[name]["said"]) == (2, []), name
        assert sentence in results[name]["errors"], name


# -- the real libraries ------------------------------------------------------------------------------------------------

REAL = {
    "transformer engine": ("transformer_engine", [*TE, "--optimizer-impl", "torch"]),
    "transformer engine, split": ("transformer_engine", [*TE, "--pipeline-schedule", "zb_v"]),
    "transformer engine, FP8": ("transformer_engine", [*TE, "--fp8", "hybrid", "--pipeline-schedule", "zb_h1"]),
    "apex": ("apex", ["--norm-impl", "apex", "--optimizer-impl", "apex"]),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", REAL)
def test_the_real_libraries_take_nearly_the_steps_of_torchs_own(name: str, tmp_path: Path) -> None:
    library, flags = REAL[name]
    pytest.importorskip(library)
    found = {}
    for label, more in {"torch": RUNS["torch"], "fused": flags}.items():
        sizes = [*SIZES, "--precision", "bf16", "--device", "cuda", "--run-dir", str(tmp_path / label)]
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), *sizes, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found[label] = losses(tmp_path / label)
    assert found["fused"] == pytest.approx(found["torch"], rel=0.05)
