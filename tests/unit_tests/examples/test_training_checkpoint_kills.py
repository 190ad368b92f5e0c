"""A kill at any moment of saving leaves a whole checkpoint: the former one, or the new one."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from examples.gpt.checkpoint import find_checkpoint
from testkit.sweeps import EXHAUSTIVE, drawn
from tests.unit_tests.examples.test_training_checkpoint import is_whole, lone_group, save

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save_in_a_process(folder: Path, step: int, kill_at: int) -> int:
    """Save ``step``, and be killed at the ``kill_at``th moment.

    Returns how it ended, as ``os.waitstatus_to_exitcode``: 0, or minus the signal.
    """
    pid = os.fork()
    if pid == 0:
        try:
            with lone_group():
                Killer(kill_at, folder).start()
                save(folder, step)
                os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Killer:
    """Has this process killed at the ``number``th moment of what it does with files in ``folder``: before each
    operation, and after each file was opened, when it is empty.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.left = number
        self.folder = str(folder)
        self.opening = False

    def start(self) -> None:
        sys.addaudithook(self.on_event)
        sys.setprofile(self.on_call)

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS:
            return
        # shutil.rmtree names files relative to their folder, whose descriptor is the last argument.
        in_folder = event in ("os.remove", "os.rmdir") and args[-1] >= 0
        if in_folder or str(args[0]).startswith(self.folder):
            self.opening = event == "open"
            self.moment()

    def on_call(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and self.opening and function is io.open:
            self.opening = False
            self.moment()

    def moment(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*multi-threaded.*fork")
def test_a_kill_at_any_moment_of_saving_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    """Step 1 is saved, step 2 cut short, and step 3 saved after that. A run draws every third moment of step 2."""
    found = []
    (first,) = [1] if EXHAUSTIVE else drawn(range(1, 4), 1)
    with lone_group():
        save(tmp_path / "0", 1)
    for kill_at in range(first, 200, 1 if EXHAUSTIVE else 3):
        folder = tmp_path / str(kill_at)
        shutil.copytree(tmp_path / "0", folder)
        ended = save_in_a_process(folder, 2, kill_at)
        found.append(find_checkpoint(folder).step)
        with lone_group():
            assert all(map(is_whole, (folder, *folder.glob("step-*"))))  # what can be seen is whole
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
            save(folder, 3)
        assert find_checkpoint(folder).step == 3
        assert [path for path in folder.iterdir() if path.name.startswith(".")] == []
    assert found == sorted(found)
    assert len(found) > 10
    assert set(found) == {1, 2}
