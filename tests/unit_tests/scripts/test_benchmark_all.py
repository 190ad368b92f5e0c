"""`benchmark.py all`: a benchmark that fails ends no other, and the end lists what became of each."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import benchmarks.all as every_benchmark

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "benchmark.py"


def start(out: Path, *only: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "all", "--quick", "--out", str(out), "--only", *only]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in what runs with "&"
    )


def outcomes(printed: str) -> list[list[str]]:
    """The lines of the end, in words, without the seconds."""
    lines = printed.rsplit(" in all\n", 1)[1].splitlines()
    return [[name, *rest] for name, _, _, *rest in map(str.split, lines)]


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "code"), [(["tracing"], 1), ([], 0)])
def test_a_failure_ends_no_other_and_a_missing_gpu_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: list[str], code: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in failing:
        (tmp_path / f"{name}.json").mkdir()  # so its report cannot be written
    asked = argparse.Namespace(out=tmp_path, only=[*failing, "gpu"], quick=True, deadline=240.0)
    assert every_benchmark.run(asked) == code
    assert outcomes(capfd.readouterr().out) == [
        *([name, "exit", "code", "2"] for name in failing),
        ["gpu", "left", "out:", "there", "is", "no", "GPU"],
    ]


def runs_its_own_program(parent: int) -> bool:
    """Whether a process has a child that is no copy of itself any more."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return any(
        Path(f"/proc/{child}/cmdline").read_text() != Path(f"/proc/{parent}/cmdline").read_text() for child in children
    )


@pytest.mark.slow
def test_an_interrupt_ends_the_benchmark_that_runs_and_lists_the_rest(tmp_path: Path) -> None:
    process = start(tmp_path, "tracing", "growth")
    assert process.stdout is not None
    while "tracing" not in process.stdout.readline():
        pass
    while not runs_its_own_program(process.pid):
        time.sleep(0.05)
    time.sleep(1.0)  # the benchmark has been started; now it is being waited for
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert outcomes(printed) == [["tracing", "interrupted"], ["growth", "not", "started"]]
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
