"""One run at a time in a folder, and no process of a run without its launcher."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.gpt.errors import ArgumentError, RunInUseError
from examples.gpt.program import LOCK, WRITTEN, lock_folder

ROOT = Path(__file__).resolve().parents[3]


HOLDER = """
import signal, sys
from pathlib import Path
from examples.gpt.program import lock_folder
held = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""


def test_the_lock_goes_with_its_process_however_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(
                RunInUseError, match=rf"folder {tmp_path} is in use by another run; .* another --run-dir"
            ):
                lock_folder(tmp_path)
        finally:
            holder.kill()
    lock_folder(tmp_path).close()


def test_a_file_system_without_locks_is_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="cannot be locked .*No locks available.*: do not start a second run in it"):
        lock_folder(tmp_path).close()


@pytest.mark.parametrize("kind", ["fifo", "link", "no folder"])
def test_a_path_that_is_no_lock_file_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    if kind == "no folder":
        folder.write_text("mine")
    else:
        folder.mkdir()
        os.mkfifo(folder / LOCK) if kind == "fifo" else (folder / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(ArgumentError, match="the run's folder cannot be used"):
        lock_folder(folder)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("kind", ["link", "link to nothing", "second name"])
def test_a_folder_whose_files_are_links_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    if kind != "link to nothing":
        victim.write_text("precious")
    (folder / name).hardlink_to(victim) if kind == "second name" else (folder / name).symlink_to(victim)
    with pytest.raises(ArgumentError, match=rf"it is a link, and a run writes only into its own folder.*{name}"):
        lock_folder(folder)
    assert kind == "link to nothing" or victim.read_text() == "precious"
    assert sorted(path.name for path in folder.iterdir()) == [name]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system's own means")
def test_a_process_whose_launcher_ended_before_it_registered_ends_too() -> None:
    """test_train_script.py shows that a process whose launcher lives goes on."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "MEGATRON_PP_LAUNCHER": str(gone.pid)}
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--train-steps", "-1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (done.stdout + done.stderr).strip() == f"train.py: process {gone.pid}, its launcher, has ended"
