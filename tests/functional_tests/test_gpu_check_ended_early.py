"""scripts/gpu_check.sh leaves what it has when its time ends, and when a signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"


def started(out: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(SCRIPT), "--cpu", "--megabytes", "1", "--repeats", "1", "--seconds", str(seconds), "--out", str(out)],
        env={**os.environ, "MEGATRON_PP_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_section_that_exceeds_the_time_fails_and_the_rest_is_named(tmp_path: Path) -> None:
    run = started(tmp_path / "results.md", 1.0)
    printed, _ = run.communicate(timeout=240.0)
    text = (tmp_path / "results.md").read_text()
    assert run.returncode == 1, printed
    assert "- FAILED: gloo: facts: RanksTimedOutError" in text
    assert "- NOT RUN: gloo: steps" in text
    assert "- NOT RUN: gloo: facts" not in text
    assert "All checks passed" not in text


def test_sigterm_leaves_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    run = started(out, 400.0)
    until = time.monotonic() + 240.0
    while not out.exists() and time.monotonic() < until:  # written after the first section
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    printed, _ = run.communicate(timeout=240.0)
    text = out.read_text()
    assert "sum of ranks 1.0" in text
    assert "- NOT RUN: gloo: overlap" in text
    assert "gpu_check: ended early" in printed
    assert "sum of ranks 1.0" in printed
