"""Runs the training program on ranks of ``run_processes``, in one process group for all runs. Tests of its numbers and
files so need no launcher and no new interpreters, which take seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from testkit.processes import run_processes


@contextmanager
def _in_the_given_group(*_: Any) -> Iterator[None]:
    """Replaces the context that makes a process group for each run."""
    from megatron_pp import parallel_state
    from megatron_pp.runtime.communicators import close_communicators

    yield
    close_communicators()
    parallel_state.destroy_model_parallel()


@contextmanager
def handlers_kept() -> Iterator[None]:
    """A context that restores the handlers of the signals that end a run."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_here(flags: Sequence[str]) -> Any:
    """Run the training program once in this process. Returns its ``Trainer``."""
    from examples.gpt import program

    with handlers_kept():
        return program.train(flags)


def train_rank(rank: int, size: int, folder: Path, runs: Sequence[Sequence[str]]) -> str:
    """One rank of ``train``."""
    from examples.gpt import program

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.chdir(folder)
    program.joined = _in_the_given_group  # type: ignore[assignment]
    with redirect_stdout(StringIO()) as output:
        for flags in runs:
            train_here([*flags, "--no-plot"])  # drawing would take as long as a small run
    return output.getvalue()


def train(ranks: int, folder: Path, *runs: Sequence[str], timeout: float = 150.0) -> str:
    """Run the training program in ``folder``, once for each of ``runs``, which are flags. Returns the first rank's
    output. Raises RankFailedError if a rank raises.
    """
    return run_processes(train_rank, ranks, (folder, runs), timeout=timeout, start_method="forkserver")[0]
