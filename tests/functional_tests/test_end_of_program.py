"""A program ends with its own exit status, whatever the package's threads do at that moment: a daemon thread that comes
back from C++ code of torch while the interpreter finalises would abort the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = ["-m", "tests.functional_tests.ending_program"]


@pytest.mark.parametrize("what", ["abort", "transfer"])
def test_an_uncaught_error_does_not_abort_the_process_at_exit(what: str) -> None:
    ended = subprocess.run([sys.executable, *PROGRAM, what], capture_output=True, text=True, timeout=120.0)
    assert "terminate called" not in ended.stderr
    assert ended.returncode == 3, ended.stderr
