"""One run at a time in a folder, and no process of a run without its launcher."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from examples.gpt.errors import ArgumentError, RunInUseError
from examples.gpt.run_folder import LOCK, lock_folder

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_is_free_again_when_the_last_process_of_its_run_has_left(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    held = [lock_folder(folder, first=True), *(lock_folder(folder, first=False) for _ in range(2))]
    for file in held:
        with pytest.raises(RunInUseError, match=rf"run is in use: .*process {os.getpid()} on .* another --run-dir"):
            lock_folder(tmp_path / "new" / "run", first=True)
        file.close()
    lock_folder(folder, first=True).close()


def test_a_process_does_not_follow_into_a_folder_that_another_run_takes(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    with open(tmp_path / LOCK) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunInUseError, match="a process that has just started"):
            lock_folder(tmp_path, first=False)


def test_the_lock_goes_with_its_process_however_it_ends(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        held = lock_folder(tmp_path, first=True)
        signal.pause()
        os._exit(held.closed)
    try:
        while not (tmp_path / LOCK).exists() or not (tmp_path / LOCK).stat().st_size:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        with pytest.raises(RunInUseError, match=f"process {pid} on "):
            lock_folder(tmp_path, first=True)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lock_folder(tmp_path, first=True).close()


def test_a_file_system_without_locks_is_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for first in (True, False):
            lock_folder(tmp_path, first=first).close()
    (said,) = (str(one.message) for one in noted)  # once for a run
    assert re.fullmatch(".* cannot be locked .*No locks available.*: start no second run in it", said)


@pytest.mark.parametrize("kind", ["fifo", "link", "no folder"])
def test_what_is_no_lock_file_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    if kind == "no folder":
        folder.write_text("mine")
    else:
        folder.mkdir()
        os.mkfifo(folder / LOCK) if kind == "fifo" else (folder / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(ArgumentError, match="the run's folder cannot be used"):
        lock_folder(folder, first=True)
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system's own means")
def test_a_process_whose_launcher_has_ended_before_it_could_ask_ends_too() -> None:
    """That one whose launcher lives goes on, test_train_script.py shows."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "MEGATRON_PP_LAUNCHER": str(gone.pid)}
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--train-steps", "-1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (done.stdout + done.stderr).strip() == f"train.py: process {gone.pid}, its launcher, has ended"
