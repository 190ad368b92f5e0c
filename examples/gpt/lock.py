"""One run at a time in a run's folder: each of its processes holds a lock there, and none outlives its launcher.

The system drops the locks of a process that ends, however it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from examples.gpt.errors import ArgumentError, RunInUseError
from examples.gpt.files import open_plain
from megatron_pp.faults.liveness import ALIVE, STOPPED, process_of, state_of, this_process

LOCK = "run.lock"
LAUNCHER = "MEGATRON_PP_LAUNCHER"
"""Environment variable in which scripts/launch.py names its process."""

_PR_SET_PDEATHSIG = 1


def lock_folder(folder: Path, first: bool) -> IO[bytes]:
    """Lock a run's folder until the returned file is closed or the process ends. Does not wait.

    The run's first process, which makes the folder, asks for it to itself, and gets it when no process of another run
    is left. Then it shares it with the others of its run.

    Raises:
        RunInUseError: a process of another run holds it.
        ArgumentError: the lock's file cannot be opened.
    """
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
        file = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ArgumentError(f"the run's folder cannot be used ({error}); every node needs to write to it") from error
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if first else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if first:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            file.flush()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = file.read(200).decode(errors="replace").strip() or "a process that has just started"
        file.close()
        raise RunInUseError(
            f"the run's folder {folder} is in use: its run was started by {holder}; wait until all processes of that "
            "run have ended, or end them, or give another --run-dir"
        ) from error
    except OSError as error:  # a file system without locks
        if first:
            warnings.warn(f"{folder} cannot be locked ({error}): start no second run in it", stacklevel=2)
    return file


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Have the system kill this process when the launcher that has started it ends, or has ended already. On Linux."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in environment:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = environment.get(LAUNCHER, "")
    if launcher.isdecimal() and this_process().host and state_of(process_of(int(launcher))) not in (ALIVE, STOPPED):
        print(f"train.py: process {launcher}, its launcher, has ended", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
