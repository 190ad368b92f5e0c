"""The folder of a run: one run at a time in it, and where a run begins.

It begins anew, where ``--resume`` says, or, when torchrun has started its processes again with the old command line
(``--max-restarts``), where it was. A restart is recognized by rank 0's launcher, which outlives its ranks: its name is
in the run's ``arguments.json`` and in each checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch.distributed as dist

from examples.gpt.checkpoint import Checkpoint, check_layout, find_checkpoint, newest_name
from examples.gpt.distributed import on_all_ranks
from examples.gpt.errors import ArgumentError, RunInUseError
from examples.gpt.files import open_plain
from examples.gpt.settings import ARGUMENTS, Settings, find_run, launcher_of
from megatron_pp.faults.liveness import process_of

LOCK, RUNS = "run.lock", Path(__file__).resolve().parents[2] / "runs"


class Start(NamedTuple):
    """Where a run begins: in ``folder``, which need not exist, from ``checkpoint``."""

    folder: Path
    checkpoint: Checkpoint | None = None


def this_launcher() -> str:
    """The torchrun process that has started this one: the same in all restarts. Empty without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return f"{socket.gethostname()}/{os.getppid()}/{process_of(os.getppid()).started}"


def find_start(settings: Settings, layout: dict[str, Any], launcher: str) -> Start:
    """Where the run of these settings begins, if ``launcher`` is that of its rank 0.

    After a restart that is the newest checkpoint that was saved since ``launcher`` has started, or as the settings say.

    Raises ArgumentError: the folder holds another run, or cannot be written; CheckpointError: there is no checkpoint to
    continue from, or it is of another layout."""
    folder = _folder_of(settings, launcher)
    again = launcher != "" and launcher_of(folder) == launcher
    checkpoint = None
    if again and newest_name(folder / "checkpoints") is not None:
        newest = find_checkpoint(folder)
        checkpoint = newest if newest.progress.get("launcher") == launcher else None
    if checkpoint is None and settings.resume is not None:
        checkpoint = find_checkpoint(Path(settings.resume))
    if checkpoint is not None:
        check_layout(checkpoint, layout)
    elif not again and (folder / ARGUMENTS).exists():
        raise ArgumentError(f"--run-dir {folder} holds a run already; give another, or --resume {folder}")
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ArgumentError(f"{existing} is no writable folder, so {folder} cannot be made; give another --run-dir")
    return Start(folder, checkpoint)


@contextmanager
def agreed_start(settings: Settings, layout: dict[str, Any]) -> Iterator[Start]:
    """Rank 0's ``find_start`` (what others see of a shared folder may be older); every rank locks the folder meanwhile.
    Collective. Errors are raised on every rank."""
    rank, launcher = dist.get_rank(), this_launcher()
    with ExitStack() as locks:

        def begin(folder: Path) -> Start:
            locks.enter_context(lock_folder(folder, first=rank == 0))
            return find_start(settings, layout, launcher) if rank == 0 else Start(folder)

        start: Start = on_all_ranks(lambda: begin(_folder_of(settings, launcher)) if rank == 0 else None)[0]
        on_all_ranks(lambda: begin(start.folder) if rank > 0 else None)
        yield start


def lock_folder(folder: Path, first: bool) -> IO[bytes]:
    """Lock a run's folder until the file is closed or the process ends, however it ends. Does not wait. The run's first
    process, which makes the folder, asks for it alone, and gets it when no process of another run is left. Then it
    shares it with the others of its run. Raises RunInUseError, ArgumentError (the file is unusable)."""
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
    except BlockingIOError:
        holder = file.read(200).decode(errors="replace").strip() or "a process that has just started"
        file.close()
        advice = "wait until all processes of that run have ended, or end them, or give another --run-dir"
        raise RunInUseError(f"the run's folder {folder} is in use: its run was started by {holder}; {advice}") from None
    except OSError as error:  # a file system without locks
        if first:
            warnings.warn(f"{folder} cannot be locked ({error}): start no second run in it", stacklevel=2)
    return file


def _folder_of(settings: Settings, launcher: str) -> Path:
    if settings.resume is not None:
        return find_run(Path(settings.resume))
    if settings.run_dir is not None:
        return Path(settings.run_dir)
    runs = [path.parent for path in RUNS.glob(f"*/{ARGUMENTS}")] if launcher else []
    new = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return max((folder for folder in runs if launcher_of(folder) == launcher), default=new)
