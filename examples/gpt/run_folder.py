"""The folder of a run: one run at a time in it, and where a run begins.

It begins anew, where ``--resume`` says, or where it was when torchrun has started its processes again with the old
command line (``--max-restarts``): ``launch.json`` names rank 0's launcher, which outlives its ranks.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch.distributed as dist

from examples.gpt.checkpoint import check_layout, find_checkpoint, newest_name
from examples.gpt.command_line import ARGUMENTS, find_run
from examples.gpt.description import Checkpoint
from examples.gpt.distributed import agreed
from examples.gpt.errors import ArgumentError, RunInUseError
from examples.gpt.files import open_plain, read_text, write_atomically
from examples.gpt.settings import Settings
from megatron_pp.faults.liveness import process_of

LOCK, LAUNCH, RUNS = "run.lock", "launch.json", Path("runs")


class Start(NamedTuple):
    """Where a run begins: in ``folder``, which need not exist, from ``checkpoint``; ``again``: by the same launcher."""

    folder: Path
    checkpoint: Checkpoint | None = None
    again: bool = False


class Launch(NamedTuple):
    """The launcher that wrote to a folder last, the checkpoint it continued, and the newest one at that time."""

    launcher: str
    began_with: str | None
    newest_then: str | None


def this_launcher() -> str:
    """The torchrun process that has started this one: the same in all restarts. Empty without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return f"{socket.gethostname()}/{os.getppid()}/{process_of(os.getppid()).started}"


def find_start(settings: Settings, layout: dict[str, Any], launcher: str) -> Start:
    """Where the run of these settings begins, if ``launcher`` is that of its rank 0.

    Raises ArgumentError: the folder holds another run, or cannot be written; CheckpointError: there is no checkpoint to
    continue from, or it is of another layout.
    """
    folder = _folder_of(settings, launcher)
    launch = _read_launch(folder)
    again = launch is not None and launch.launcher == launcher
    source = settings.resume
    if launch is not None and again:
        newest = newest_name(folder / "checkpoints")
        has_saved = newest is not None and newest != launch.newest_then
        source = f"{folder}/checkpoints/{newest}" if has_saved else launch.began_with
    if source is not None:
        checkpoint = find_checkpoint(Path(source))
        check_layout(checkpoint, layout)
        return Start(folder, checkpoint, again)
    if not again and (folder / ARGUMENTS).exists():
        raise ArgumentError(f"--run-dir {folder} holds a run already; give another, or --resume {folder}")
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ArgumentError(f"{existing} is no writable folder, so {folder} cannot be made; give another --run-dir")
    return Start(folder, None, again)


@contextmanager
def agreed_start(settings: Settings, layout: dict[str, Any]) -> Iterator[Start]:
    """Rank 0's ``find_start`` (what others see of a shared folder may be older); every rank locks the folder meanwhile.

    Collective. Errors are raised on every rank.
    """
    rank, launcher = dist.get_rank(), this_launcher()
    with ExitStack() as locks:

        def begin(folder: Path) -> Start:
            locks.enter_context(lock_folder(folder, first=rank == 0))
            return find_start(settings, layout, launcher) if rank == 0 else Start(folder)

        start: Start = agreed(lambda: begin(_folder_of(settings, launcher)) if rank == 0 else None)
        agreed(lambda: begin(start.folder) if rank > 0 else None)
        yield start


def remember(start: Start) -> None:
    """Note in the run's folder, which exists, that this process's launcher has started it. Called by rank 0."""
    began_with = None if start.checkpoint is None else str(start.checkpoint.path.absolute())
    launch = Launch(this_launcher(), began_with, newest_name(start.folder / "checkpoints"))
    if not start.again:
        write_atomically(start.folder / LAUNCH, json.dumps(launch._asdict(), indent=1) + "\n")


def lock_folder(folder: Path, first: bool) -> IO[bytes]:
    """Lock a run's folder until the file is closed or the process ends, however it ends. Does not wait.

    The run's first process, which makes the folder, asks for it alone, and gets it when no process of another run is
    left. Then it shares it with the others of its run. Raises RunInUseError, ArgumentError (the file is unusable).
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
    launches = [(path.parent, _read_launch(path.parent)) for path in RUNS.glob(f"*/{LAUNCH}")]
    ours = [folder for folder, launch in launches if launch is not None and launch.launcher == launcher]
    return max(ours, default=RUNS / time.strftime("%Y%m%d-%H%M%S"))


def _read_launch(folder: Path) -> Launch | None:
    """None where there is none, or one that cannot be read: the run is then not continued by itself."""
    try:
        launch = Launch(**json.loads(read_text(folder / LAUNCH)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    whole = all(isinstance(value, str | None) for value in launch)
    return launch if whole and launch.launcher else None
