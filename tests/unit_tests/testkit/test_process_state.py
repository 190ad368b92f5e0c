"""What one test leaves behind in its process is named, and is that test's failure."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit import process_state
from testkit.pages import ROOT

pytestmark = pytest.mark.callers_thread  # a test starts an interpreter that imports torch late


def leave_level() -> Callable[[], Any]:
    logger = logging.getLogger("megatron_pp")
    before = logger.level
    logger.setLevel(before + 1)
    return lambda: logger.setLevel(before)


def leave_handler() -> Callable[[], Any]:
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    return lambda: logging.getLogger().removeHandler(handler)


def leave_filter() -> Callable[[], Any]:
    logger, kept = logging.getLogger("megatron_pp"), logging.Filter("other")
    logger.addFilter(kept)
    return lambda: logger.removeFilter(kept)


def leave_variable() -> Callable[[], Any]:
    os.environ["NCCL_LEFT_BEHIND"] = "1"
    return lambda: os.environ.pop("NCCL_LEFT_BEHIND")


def leave_signal_handler() -> Callable[[], Any]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR1, before)


def leave_dtype() -> Callable[[], Any]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def leave_folder() -> Callable[[], Any]:
    before = os.getcwd()
    os.chdir("/")
    return lambda: os.chdir(before)


LEFT = {
    "level of logger megatron_pp": leave_level,
    "handlers of logger root": leave_handler,
    "filters of logger megatron_pp": leave_filter,
    "environment variable NCCL_LEFT_BEHIND": leave_variable,
    "handler of SIGUSR1": leave_signal_handler,
    "torch's default dtype": leave_dtype,
    "current folder": leave_folder,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_behind_is_named(name: str) -> None:
    before = process_state.values()
    with ExitStack() as undo:
        undo.callback(LEFT[name]())
        (line,) = process_state.changes(before, process_state.values())
    assert line.startswith(f"{name} was ")
    assert process_state.changes(before, process_state.values()) == []


def test_an_import_of_torch_in_between_is_no_change() -> None:
    code = "from testkit import process_state as p; b = p.values(); import torch; print(p.changes(b, p.values()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_the_test_that_leaves_something_fails(tmp_path: Path) -> None:
    code = "import logging\n\ndef test_it():\n    logging.getLogger('megatron_pp').setLevel(logging.INFO)\n"
    (tmp_path / "test_leaving.py").write_text(code)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-c", "/dev/null"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path / "test_leaving.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "this test left its process changed: level of logger megatron_pp was 0 and is 20" in done.stdout
    assert "1 passed, 1 error" in done.stdout
