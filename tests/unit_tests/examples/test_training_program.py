"""The whole program in one process: a pipeline of one rank needs no peers."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.gpt.checkpoint import find_checkpoint
from examples.gpt.metrics import METRICS, read_metrics
from examples.gpt.program import lock_folder, main
from megatron_pp import parallel_state
from testkit.train_flags import SMALL_MODEL
from testkit.training_ranks import handlers_kept, train_here

SMALL = [*SMALL_MODEL, "--num-microbatches", "2", "--max-data-bytes", "100000", "--warmup-steps", "1"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process, and none of the last test's groups."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with handlers_kept():
        yield
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def validation_losses(folder: Path) -> list[float]:
    return [r["validation_loss"] for r in read_metrics(folder / METRICS) if "validation_loss" in r]


def flags(folder: Path, more: str = "") -> list[str]:
    return [*SMALL, "--run-dir", str(folder), *more.split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "--virtual-pipeline-model-parallel-size 2",
        "--untie-embeddings-and-output-weights",
        "--precision bf16",
        "--num-microbatches-with-partial-activation-checkpoints 0",
        "--pipeline-schedule gpipe --clip-grad 0",
    ],
)
def test_every_kind_of_run_learns(tmp_path: Path, more: str) -> None:
    outcome = train_here(flags(tmp_path / "run", f"--train-steps 12 --learning-rate 1e-2 {more}"))
    assert (outcome.steps_done, outcome.validated_at, outcome.stopped_by) == (12, 12, None)
    before, after = validation_losses(tmp_path / "run")
    assert before == pytest.approx(math.log(256), abs=0.5)
    assert after < before - 0.5
    assert find_checkpoint(tmp_path / "run").step == 12
    assert not dist.is_initialized()


def test_a_loss_that_is_no_number_ends_the_run_before_the_weights_are_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, as that is no bad input: a job's script that gives up on code 2 goes on."""
    more = "--train-steps 5 --learning-rate 1e30 --min-learning-rate 0 --save-interval 1"
    assert main(flags(tmp_path / "run", more)) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("train.py: NonFiniteLossError: step 2 gave loss ")
    assert re.search(r"loss (nan|inf) .* lower --learning-rate than 1e\+30", told)
    assert find_checkpoint(tmp_path / "run").step == 1


@pytest.mark.slow
def test_each_kind_of_failure_has_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, new = tmp_path / "run", "--train-steps 0"
    resume = ["--resume", str(folder)]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "checkpoints").write_text("in the way")
    codes = [code_of(resume), code_of(flags(tmp_path / "none", f"{new} --data {tmp_path}/nothing"))]
    codes += [code_of(flags(tmp_path / "full", new)), code_of(flags(folder, new))]
    with lock_folder(folder):
        codes += [code_of(resume), code_of([*resume, "--hidden-size", "16"])]
    (tensors,) = folder.rglob("*.distcp")
    tensors.write_bytes(b"")
    codes += [code_of(resume)]
    assert codes == [2, 2, 4, 0, 5, 2, 3]
    said = capsys.readouterr().err
    names = "NoCheckpoint Data CheckpointWrite RunInUse CheckpointLayout Checkpoint"
    assert [line.split(": ")[1] for line in said.splitlines()] == [f"{name}Error" for name in names.split()]
    assert f"the run's folder {folder} is in use by another run; wait until that run has ended" in said


def code_of(command: list[str]) -> int:
    """The exit code; what a process would leave behind is put away."""
    code = main(command)
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_here(flags(tmp_path / "run", "--train-steps 2"))
    before = (tmp_path / "run" / METRICS).read_text()
    last_words = capsys.readouterr().out.splitlines()[-1]
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / METRICS).read_text() == before
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == last_words
    assert "nothing is left to train after step 2 of 2 (--train-steps); give a larger --train-steps" in said


@pytest.mark.slow
def test_resuming_never_follows_a_link_into_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second folder whose checkpoints are a link to those of the first, however it is named to --resume."""
    mine, strange = tmp_path / "mine", tmp_path / "strange"
    train_here(flags(mine, "--train-steps 1 --keep-checkpoints 1"))
    before = [(path, path.stat().st_mtime_ns) for path in mine.rglob("*")]
    shutil.copytree(mine, strange, ignore=lambda *_: ["checkpoints"])
    (strange / "checkpoints").symlink_to(mine / "checkpoints")
    (tmp_path / "step-00000001").symlink_to(mine / "checkpoints" / "step-00000001")
    for inside in ("", "checkpoints", "checkpoints/step-00000001"):
        assert code_of(["--resume", str(strange / inside), "--train-steps", "2"]) == 2
        assert "it is a link, and a run writes only into its own folder" in capsys.readouterr().err
        assert [(path, path.stat().st_mtime_ns) for path in mine.rglob("*")] == before
    train_here(["--resume", str(tmp_path / "step-00000001"), "--train-steps", "1"])
    assert not (tmp_path / "latest").exists()
