"""The folder of a run: one run at a time in it, and where a run begins.

A run whose folder holds one of the same settings goes on with that, so torchrun may start its processes again with the
old command line (``--max-restarts``). The checkpoint that a run resumes from is the newest one until the run has saved.
"""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from examples.gpt.checkpoint import LATEST, Checkpoint, check_layout, find_checkpoint
from examples.gpt.errors import ArgumentError, RunInUseError
from examples.gpt.files import open_plain
from examples.gpt.process import on_all_ranks, on_first_rank
from examples.gpt.settings import ARGUMENTS, Settings, find_run, saved_values
from megatron_pp.faults.liveness import process_of

LOCK, RUNS = "run.lock", Path(__file__).resolve().parents[2] / "runs"


class Start(NamedTuple):
    """Where a run begins: in ``folder``, which need not exist, from ``checkpoint``."""

    folder: Path
    checkpoint: Checkpoint | None = None


def find_start(settings: Settings, layout: dict[str, Any], again: bool = False) -> Start:
    """Where the run of these settings begins; ``again``: after a restart by torchrun. Raises ArgumentError: the folder
    holds another run; CheckpointError: there is no checkpoint to continue from, or it is of another layout."""
    folder, checkpoint = _folder_of(settings), None
    if settings.resume is not None:
        checkpoint = find_checkpoint(Path(settings.resume))
        if again and checkpoint.path.name == checkpoint.name:  # a copy under another name is never the newest
            checkpoint = find_checkpoint(folder)
    elif (folder / ARGUMENTS).exists():
        if saved_values(folder) != settings.to_save():
            advice = f"give another, or --resume {folder} with what shall change"
            raise ArgumentError(f"--run-dir {folder} holds a run of other settings; {advice}")
        if (folder / "checkpoints" / LATEST).exists():
            checkpoint = find_checkpoint(folder)
    if checkpoint is not None:
        check_layout(checkpoint, layout)
    return Start(folder, checkpoint)


@contextmanager
def agreed_start(settings: Settings, layout: dict[str, Any]) -> Iterator[Start]:
    """Rank 0's ``find_start`` (what others see of a shared folder may be older), which locks the folder meanwhile.
    Collective. Errors are raised on every rank."""
    with ExitStack() as held:

        def begin() -> Start:
            file, launcher = held.enter_context(lock_folder(_folder_of(settings))), _launcher()
            # The restart count does not do: an agent does not count restarts that another one caused.
            start = find_start(settings, layout, again="TORCHELASTIC_RUN_ID" in os.environ and file.read() == launcher)
            file.seek(0)
            file.truncate()
            file.write(launcher)
            file.flush()
            return start

        start: Start = on_first_rank(begin)
        on_all_ranks(lambda: (start.folder / LOCK).stat())  # every node writes to it
        yield start


def lock_folder(folder: Path) -> IO[bytes]:
    """Make a run's folder, and lock it until the file is closed or the process ends, however it ends. Does not wait.
    Raises RunInUseError, ArgumentError (the file is unusable)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ArgumentError(f"the run's folder cannot be used: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        advice = "wait until it has ended, or end it, or give another --run-dir"
        raise RunInUseError(f"the run's folder {folder} is in use by another run; {advice}") from None
    except OSError as error:  # a file system without locks
        warnings.warn(f"{folder} cannot be locked ({error}): start no second run in it", stacklevel=2)
    return file


def _folder_of(settings: Settings) -> Path:
    if settings.resume is not None:
        return find_run(Path(settings.resume))
    if settings.run_dir is not None:
        return Path(settings.run_dir)
    name = _launcher().decode()
    return next(RUNS.glob(f"*-{name}"), RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")


def _launcher() -> bytes:
    """Torchrun's process, which outlives those that it starts; without torchrun this one."""
    process = process_of(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
    return f"{process.pid}-{process.started}".encode()
