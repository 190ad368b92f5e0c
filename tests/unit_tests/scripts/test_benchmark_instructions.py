"""The count of instructions: what runs under callgrind, and how its files are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import benchmark
import pytest

from benchmarks import instructions
from benchmarks.overhead import MODEL
from benchmarks.report import BenchmarkError

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_all_engines_run_one_after_the_other_and_reasons_are_given_for_the_others() -> None:
    """The counted process itself, which runs without callgrind too."""
    command = [sys.executable, "-m", "benchmarks.instructions", "interleaved_1f1b P=2 V=2 plain", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr[-1000:]
    ran, left_out = instructions._said(done.stdout)
    assert ran[0] == "ours"
    assert ran[-1] == MODEL
    assert {*ran, *left_out} == {*instructions.ENGINES, MODEL}
    assert "--megatron-source" in left_out["megatron-main"]


def test_the_total_of_a_file_of_callgrinds(tmp_path: Path) -> None:
    file = tmp_path / "counts.2"
    file.write_text("events: Ir\nfn=(1) main\n3 40\ntotals: 4700\n")
    assert instructions._total(file) == 4700
    file.write_text("events: Ir\n")
    with pytest.raises(BenchmarkError, match="no total"):
        instructions._total(file)


def test_a_missing_tool_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert benchmark.main(["instructions"]) == 2
    assert "no valgrind on PATH" in capsys.readouterr().err
    (tmp_path / "valgrind").write_text("#!/bin/sh\n")
    (tmp_path / "valgrind").chmod(0o755)
    assert benchmark.main(["instructions", "--only", "nothing like it"]) == 2
    assert "no setting of this benchmark has 'nothing like it'" in capsys.readouterr().err
