"""A child process that answers: what it imports, how it ends, and that a forked process leaves it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_pp.common.child_process import Child

MODULE = "megatron_pp.features.packing.ahead"
ROOT = Path(__file__).resolve().parents[3]


def test_a_child_process_imports_nothing_from_the_current_folder_or_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dataclasses", "json", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child(MODULE)
    child.ask({"number": 1})
    with pytest.raises(RuntimeError, match="KeyError"):
        child.answer(60.0)
    child.end()
    assert not (tmp_path / "ran").exists()


def test_a_request_to_a_stopped_child_process_does_not_block() -> None:
    child = Child(MODULE)
    child.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    child.ask("x" * (1 << 22))
    with pytest.raises(TimeoutError, match=r"has not answered for 0\.2 s"):
        child.answer(0.2)
    assert time.monotonic() - began < 5.0
    child.process.send_signal(signal.SIGCONT)
    with pytest.raises(RuntimeError, match=r"TypeError|AttributeError"):
        child.answer(60.0)
    child.end()


def test_a_killed_child_process_raises_an_error_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(MODULE)
    child.process.kill()
    child.ask({})
    with pytest.raises(ChildProcessError, match="ended with code -9"):
        child.answer(60.0)


FORKING = """
import os, sys
from megatron_pp.features.packing.packing import PackingRules
from megatron_pp.features.packing.steps import PackedSteps
from megatron_pp.plan.ir.spec import PlanSpec

steps = PackedSteps(iter([[12, 3, 9, 12], [3, 12, 12, 1]]), PackingRules(1, 12, 0.5))
steps.plan_ahead(PlanSpec("1f1b", 2, 1, len(steps.next().slots)))
if os.fork() == 0:
    sys.exit(0)
_, status = os.wait()
print(status, len(steps.next().slots))
"""


def test_a_forked_process_that_exits_does_not_end_the_child_process() -> None:
    program = [sys.executable, "-c", FORKING]
    ran = subprocess.run(
        program, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert ran.returncode == 0, ran.stderr
    status, slots = map(int, ran.stdout.split())
    assert status == 0
    assert slots > 1


CHILD = """
import time
from megatron_pp.common.child_process import answer_questions

def answer(question):
    time.sleep(0.3)
    return "x" * 100_000

answer_questions(answer, 0)
"""


def test_a_program_that_ends_before_the_answer_prints_no_traceback() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdin.write(b"1\n")
    child.stdin.flush()
    child.stdout.close()
    child.stdin.close()
    said = child.stderr.read()
    child.stderr.close()
    assert (child.wait(60), said) == (0, b"")
