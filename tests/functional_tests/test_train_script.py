"""The training script under its launcher learns, continues exactly, ends cleanly, and reports what is wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.gpt.checkpoint import find_checkpoint
from examples.gpt.program import main
from megatron_pp.faults.causes.liveness import ALIVE, STOPPED, state_of
from megatron_pp.faults.store.processes import process_of
from megatron_pp.tracing.run import load_run
from testkit.processes import RankFailedError, run_processes
from testkit.sweeps import drawn
from testkit.train_flags import SMALL_MODEL
from testkit.training_ranks import train, train_rank
from tests.functional_tests.faulty_train import Fault, put_into_optimizer

ROOT = Path(__file__).resolve().parents[2]
FAULTY = ["-m", "tests.functional_tests.faulty_train"]
DEADLINE = 180.0
"""Seconds until a run is killed; none should take a tenth of it on an idle machine."""

SMALL = [
    *SMALL_MODEL,
    *("--num-microbatches", "4", "--max-data-bytes", "400000"),
    *("--eval-interval", "4", "--warmup-steps", "2", "--log-interval", "1"),
]
TEXT = ROOT / "megatron_pp" / "config" / "model_config.py"
# This text is read quickly; the default searches the whole standard library for 400,000 bytes.
ON_TEXT = ["--data", str(TEXT), "--validation-fraction", "0.2"]
SHORT = [*SMALL, *ON_TEXT]
INTERLEAVED = ["--virtual-pipeline-model-parallel-size", "2", "--overlap-p2p-comm"]


PATIENCE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}
"""The launcher kills ranks that do not follow within that many seconds. They take one on an idle machine."""


def run_train_sh(folder: Path, *flags: str) -> tuple[int, str]:
    """Run ``scripts/train.sh`` in ``folder`` to its end, and return the exit code and all output."""
    command = ["bash", str(ROOT / "scripts" / "train.sh"), *flags]
    environment = {**os.environ, **PATIENCE, "MEGATRON_PP_PYTHON": sys.executable}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=DEADLINE, check=False, **options)
    return done.returncode, done.stdout


class Launch:
    """Runs ``scripts/launch.py`` with two ranks of a script, in a process that has already imported torch, which saves
    half of a launcher's CPU time. Its ranks start as usual. It ends with the context, or at the deadline."""

    def __init__(self, folder: Path, *script_and_flags: str, restarts: int = 0) -> None:
        flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
        self.output = folder / "output.txt"
        self.output.touch()
        command = [str(ROOT / "scripts" / "launch.py"), *flags, *script_and_flags]
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=be_launcher, args=(command, folder, self.output))

    def __enter__(self) -> Launch:
        self.until = time.monotonic() + DEADLINE
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # with which its ranks end
        self.process.join()

    def reach_step_three(self) -> None:
        while "\nstep 3/" not in self.output.read_text():
            assert self.process.is_alive(), self.output.read_text()
            assert time.monotonic() < self.until
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return the exit code and all output."""
        self.process.join(max(0.0, self.until - time.monotonic()))
        assert self.process.exitcode is not None, self.output.read_text()
        return self.process.exitcode, self.output.read_text()


def be_launcher(command: Sequence[str], folder: Path, output: Path) -> None:
    """Run the launcher in this process, in its own session, as at a terminal, with all output in a file."""
    os.setsid()
    os.chdir(folder)
    with open(output, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(PATIENCE)
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


def ranks_of(launcher: int) -> list[int]:
    """Return the processes that a launcher has started as ranks."""
    ranks = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and "\0RANK=" in (folder / "environ").read_text():
                ranks.append(int(folder.name))
    return ranks


OF_THE_MACHINE = ("tokens_per_second", "bubble", "peak_memory_gib", "mfu")


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return all metrics that do not depend on the machine's speed."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in OF_THE_MACHINE} for line in lines]


def losses(folder: Path, name: str = "loss") -> list[float]:
    return [record[name] for record in numbers(folder) if name in record]


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint, as torch's own tools read them."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(checkpoint, file.name)
        return torch.load(file.name, weights_only=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train eight steps by train.sh on two ranks with two chunks each, with dropout and a checkpoint after the fourth.

    It starts in a different directory, which has the text, and gives the text's relative path.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "texts").mkdir()
    (folder / "texts" / "text").write_bytes(TEXT.read_bytes() * 4)
    flags = [*SMALL, "--train-steps", "8", "--save-interval", "4", "--hidden-dropout", "0.1", "--data", "texts"]
    flags += ["--keep-checkpoints", "3"]  # the fourth step's checkpoint stays when a test continues from it
    flags += ["--tensorboard", "--plot", "--peak-tflops", "0.1", "--run-dir", "run"]
    code, output = run_train_sh(folder, *flags)
    assert code == 0, output
    assert output.startswith(
        "interleaved_1f1b, overlap communication, on cpu: 2 ranks x 2 chunks x 1 replica, 4 layers"
    ), output
    *_, losses_line, page_line, board_line = output.splitlines()
    assert losses_line.startswith("validation loss: ")
    where = (
        "report: open run/report.html in a browser, its loss alone in run/loss.png, other steps with --trace 3,10-12"
    )
    assert page_line == where
    assert board_line == "TensorBoard: tensorboard --logdir run/tensorboard"
    return folder / "run"


def test_a_run_leaves_metrics_a_plot_and_checkpoints(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert all(0.0 <= record["bubble"] <= 1.0 and record["tokens_per_second"] > 0 for record in steps)
    assert [record["step"] for record in records if "validation_loss" in record] == [0, 4, 8]
    assert losses(trained, "validation_loss")[-1] < losses(trained, "validation_loss")[0]
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    page = (trained / "report.html").read_text()
    assert page.count("<figure>") == 4
    assert "measured, step " in page
    assert "predicted from the plan and the measured costs" in page
    assert load_run(trained / "traces").steps == (6, 7, 8)
    assert all(record["peak_memory_gib"] > 0 and 0.0 < record["mfu"] < 1.0 for record in steps)
    assert len(list((trained / "tensorboard").glob("events.out.tfevents.*"))) == 1
    assert sorted(path.name for path in (trained / "checkpoints").iterdir()) == [
        "latest",
        "step-00000004",
        "step-00000008",
    ]


def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_bit(trained: Path) -> None:
    """Losses, gradient norms, weights and the optimizer's state are compared; dropout is on."""
    expected, kept = numbers(trained), tensors_of(trained / "checkpoints" / "step-00000008")
    train(2, ROOT, ["--resume", str(trained / "checkpoints" / "step-00000004")])
    assert numbers(trained) == expected
    again = tensors_of(trained / "checkpoints" / "step-00000008-2")
    assert again.keys() == kept.keys()
    assert {"model.layers.0.attention.qkv.weight", "optimizer.exp_avg.layers.3.feed_forward.up.weight"} <= kept.keys()
    different = [name for name, tensor in kept.items() if not tensor.equal(again[name])]
    assert different == []


# Name -> ranks and flags. A run draws one of those on two ranks, and one of the others; replicas are in each run.
CUT_OTHERWISE: dict[str, tuple[int, list[str]]] = {
    "alone": (1, []),
    "zb_h1": (2, ["--pipeline-schedule", "zb_h1"]),
    "a V": (2, ["--pipeline-schedule", "zb_v"]),
    "four": (4, ["--pipeline-schedule", "1f1b"]),
}
REPLICAS = ["--pipeline-schedule", "1f1b", "--data-parallel-size", "2", "--num-microbatches", "2"]


def test_a_run_goes_on_with_other_ranks_chunks_schedule_and_replicas(trained: Path, tmp_path: Path) -> None:
    """Go on from step 4 of 2 ranks x 2 chunks, with dropout: losses and norms equal the uninterrupted run's, to the
    bit.

    Replicas add the gradients of microbatches in a different order.
    """
    expected, runs = numbers(trained), defaultdict(list)
    cuts = drawn(["alone", "four"], 1) + drawn(["zb_h1", "a V"], 1)
    for name, (ranks, flags) in {**{name: CUT_OTHERWISE[name] for name in cuts}, "replicas": (4, REPLICAS)}.items():
        shutil.copytree(trained, tmp_path / name)
        runs[ranks].append(["--resume", str(tmp_path / name / "checkpoints" / "step-00000004"), *flags])
    for ranks, flags_of_runs in runs.items():
        train(ranks, ROOT, *flags_of_runs)
    for name in cuts:
        assert numbers(tmp_path / name) == expected, name
    for name in ("loss", "gradient_norm", "validation_loss"):
        assert losses(tmp_path / "replicas", name) == pytest.approx(losses(trained, name), rel=1e-5), name


ENDLESS = [*SMALL, *INTERLEAVED, "--train-steps", "100000", "--save-interval", "0", "--eval-interval", "0"]
TRAIN = str(ROOT / "scripts" / "train.py")


def test_ctrl_c_ends_the_run_after_a_step_with_a_checkpoint_to_continue_from(tmp_path: Path) -> None:
    """As at a terminal, the signal goes to the launcher's whole session; the launcher hands it to the ranks."""
    folder = tmp_path / "run"
    with Launch(tmp_path, TRAIN, *ENDLESS, *ON_TEXT, "--run-dir", str(folder)) as launch:
        launch.reach_step_three()
        assert launch.process.pid is not None
        os.killpg(launch.process.pid, signal.SIGINT)
        code, output = launch.end()
    assert code == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    assert "stopped by SIGINT after step" in output
    assert f"--resume {folder}" in output
    done = losses(folder)
    train(2, tmp_path, ["--resume", str(folder), "--train-steps", str(len(done) + 2)])
    assert losses(folder)[: len(done)] == done
    assert len(losses(folder)) == len(done) + 2


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    told, _ = run_processes(signalled, 2, (tmp_path,), timeout=DEADLINE, start_method="forkserver")
    assert f"stopped by SIGTERM to another rank after step {find_checkpoint(tmp_path / 'run').step}" in told


def signalled(rank: int, size: int, folder: Path) -> str:
    if rank == 1:
        put_into_optimizer(Fault(3, signal.SIGTERM))
    return train_rank(rank, size, folder, [[*ENDLESS, *ON_TEXT, "--run-dir", "run"]])


def test_the_launcher_returns_its_ranks_exit_code_and_prints_nothing(tmp_path: Path) -> None:
    script = tmp_path / "ended.py"
    script.write_text("raise SystemExit(2)")
    with Launch(tmp_path, str(script)) as launch:
        assert launch.end() == (2, "")


@pytest.mark.skipif(sys.platform != "linux", reason="the system's own means; and finds the ranks in /proc")
def test_a_run_is_alone_in_its_folder_and_ends_with_its_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    resume = ["--resume", str(folder)]
    endless = [*SHORT, *INTERLEAVED, "--train-steps", "100000", "--save-interval", "2", "--eval-interval", "0"]
    ranks: list[int] = []
    with Launch(tmp_path, TRAIN, *endless, "--run-dir", str(folder)) as launch:
        try:
            launch.reach_step_three()
            assert launch.process.pid is not None
            ranks = ranks_of(launch.process.pid)
            assert len(ranks) == 2
            with pytest.raises(RankFailedError) as refused:
                train(2, tmp_path, resume)
            assert {kind for kind, _ in refused.value.errors.values()} == {"RunInUseError"}
            assert f"the run's folder {folder} is in use by another run" in str(refused.value)
            launch.process.kill()
            wait_for_end(ranks)
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
    saved = find_checkpoint(folder).step
    output = train(2, tmp_path, [*resume, "--train-steps", str(saved + 2)])
    assert f"continuing from {folder}/checkpoints/step-{saved:08d}" in output


def wait_for_end(processes: Sequence[int]) -> None:
    """Wait until the processes have ended; their parents at that time reap them."""
    deadline = time.monotonic() + 60
    while left := [pid for pid in processes if state_of(process_of(pid)) in (ALIVE, STOPPED)]:
        assert time.monotonic() < deadline, f"processes {left} train on without their launcher"
        time.sleep(0.05)


def test_ranks_start_again_after_a_kill_and_end_with_an_error(trained: Path) -> None:
    """A rank is killed in step 6, after the checkpoint of step 4. The ranks start again and repeat the undisturbed run;
    dropout is on. The last validation raises on one rank, and no restart is left. Then the output has at most 30 lines:
    the error with its stack, the other rank's error, which names the first rank, and a last line that names it, too.
    """
    folder = trained.parent
    flags = [*SMALL, *INTERLEAVED, "--train-steps", "8", "--save-interval", "4", "--hidden-dropout", "0.1"]
    flags += ["--data", "texts", "--run-dir", "killed"]
    with Launch(folder, *FAULTY, "1", "44", "4", *flags, restarts=1) as launch:
        code, output = launch.end()
    assert code == 1, output  # the deadline would have come before the process group's timeout
    assert output.count("PipelineStallError: pipeline stalled: the process of rank 1") == 1, output
    assert f"continuing from {Path('killed/checkpoints/step-00000004')}" in output
    assert numbers(folder / "killed") == numbers(trained)[:-1]
    assert output.splitlines().count("Traceback (most recent call last):") == 1, output
    assert "OSError: [Errno 5] the disk has gone away" in output
    said = "pipeline rank 1 (global rank 1) raised OSError in forward of chunk"
    assert f"PipelinePeerError: {said}" in output
    after = output.partition("Traceback")[2].splitlines()
    assert after[-1].startswith(f"launch.py: failed: {said}")
    assert len(after) <= 30, output


FAULTY_RUN = [*SHORT, *INTERLEAVED, "--train-steps", "8", "--eval-interval", "2", "--run-dir", "run"]


def test_an_error_in_the_optimizer_of_one_rank_reaches_the_other(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as failed:
        run_processes(faulty_optimizer, 2, (tmp_path,), timeout=DEADLINE, start_method="forkserver")
    assert failed.value.errors[1] == ("OSError", "[Errno 5] the disk has gone away")
    kind, said = failed.value.errors[0]
    assert kind == "PipelinePeerError"
    assert said.startswith("pipeline rank 1 (global rank 1) raised OSError in the optimizer step")


def faulty_optimizer(rank: int, size: int, folder: Path) -> None:
    if rank == 1:
        put_into_optimizer(Fault(6))
    train_rank(rank, size, folder, [FAULTY_RUN])


def test_bad_input_is_reported_once_and_ends_the_run(tmp_path: Path) -> None:
    ended = run_processes(bad_input, 2, (tmp_path,), backend=None, timeout=DEADLINE, start_method="forkserver")
    assert [code for code, _ in ended] == [2, 2]
    output = "".join(said for _, said in ended)
    assert output.count("\n") == 1, output
    assert output.startswith("train.py: DataError: data path nothing is not a file or a readable folder")


def bad_input(rank: int, size: int, folder: Path) -> tuple[int, str]:
    """Run the program on one rank as under the launcher, and return its exit code and output."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / str(rank) / "error.json")
    os.chdir(folder)
    with redirect_stdout(StringIO()) as said, redirect_stderr(said):
        return main([*SMALL, "--data", "nothing"]), said.getvalue()


@pytest.mark.parametrize("ranks", ["0", "2.5"])
def test_an_impossible_number_of_ranks_is_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str
) -> None:
    monkeypatch.setenv("NPROC", ranks)
    sentence = f"train.sh: NPROC is {ranks}; it must be a number of ranks from 1, as in NPROC=4\n"
    assert run_train_sh(tmp_path) == (2, sentence)
