"""Finds and ends the processes that a process has started, at any depth. Only on Linux; elsewhere it finds none."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_ON_LINUX = sys.platform == "linux"
_PATIENCE = 10.0  # seconds to wait until killed processes have ended


def leave(code: int) -> NoReturn:
    """Ends this process immediately after flushing its output. Exit functions of the script do not run."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Makes the kernel (Linux) send this signal to this process when its parent has ended for any reason. Otherwise
    gloo's threads would keep a core busy in orphaned ranks."""
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Makes this process the new parent of descendants whose parent ends (Linux), so that they stay `descendants`."""
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def adopts_orphans() -> bool:
    """Whether `adopt_orphans` has been called in this process."""
    answer = ctypes.c_int(0)
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)


def descendants(pid: int) -> list[int]:
    """The process ids of all descendants of ``pid``, parents before their children."""
    children: dict[int, list[int]] = {}
    for process, parent in _parents():
        children.setdefault(parent, []).append(process)
    found = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def kill_descendants(pid: int, spared: Collection[int] = ()) -> None:
    """Kills all descendants of ``pid`` except ``spared``, and reaps those that are children of this process. Processes
    that are forked meanwhile are killed, too."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        living = [process for process in descendants(pid) if process not in spared]
        if not living:
            return
        for process in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
        for process in living:
            with contextlib.suppress(ChildProcessError):  # a child of another process, or already reaped
                os.waitpid(process, os.WNOHANG)


def _parents() -> list[tuple[int, int]]:
    """(process, its parent) of every process, including zombies."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat") if _ON_LINUX else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            after_name = status.read_text(errors="replace").rpartition(")")[2].split()
            found.append((int(status.parent.name), int(after_name[1])))
    return found
