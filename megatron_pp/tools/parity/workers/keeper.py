"""Runs work that executes a user's script in processes of its own.

A script may exit while it is imported, hang, end its process, or leave processes behind. So the command forks a keeper,
which imports nothing, and the keeper forks the worker:

    command  ->  keeper  ->  worker  ->  ranks  ->  processes of the script

The keeper passes the worker's answer to the command. If there is no answer, it reports how the worker ended. It ends
all processes below it and removes the folder of files, also if the command is ended by a signal or killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from megatron_pp.errors import MegatronPPError
from megatron_pp.tools.parity.workers.ends import RunError, ended_in_words
from megatron_pp.tools.parity.workers.process_tree import adopt_orphans, end_with_parent, kill_descendants, leave

Result = TypeVar("Result")
_READY = b"\n"  # the worker's message that it is prepared; after it, each run has its own deadline


@dataclass(frozen=True)
class Workplace:
    """The worker's folder for files, and a function that it calls when the script's imports are done."""

    folder: Path
    prepared: Callable[[], None]


@dataclass(frozen=True)
class _Outcome:
    """The worker's result in ``value``, or its exception in ``error``."""

    value: Any = None
    error: Exception | None = None


def work_apart(work: Callable[[Workplace], Result], deadline: float, what: str) -> Result:
    """The result of ``work(workplace)``, run in a process of its own. It must call ``prepared`` within ``deadline``
    seconds; ``what`` describes this part of the work in the error.

    Raises RunError if the work ends without a result, misses the deadline, or raises MegatronPPError or OSError; an
    ImportError is raised as such. SIGTERM ends this process after all processes are ended and files are removed.
    """
    reading, writing = os.pipe()
    keeper = os.fork()
    if not keeper:
        os.close(reading)
        _keep(work, deadline, what, writing)
    os.close(writing)
    with _ending_by_sigterm(keeper):
        try:
            with os.fdopen(reading, "rb") as pipe:
                answer = pipe.read()
        finally:
            _end(keeper)
    if not answer:
        raise RunError("the process that looks after the comparison has been killed")
    outcome: _Outcome = pickle.loads(answer)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _end(keeper: int) -> None:
    """Ends the keeper by SIGTERM, so that it cleans up, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(keeper, 0)


@contextlib.contextmanager
def _ending_by_sigterm(keeper: int) -> Iterator[None]:
    """A context in which SIGTERM first ends the keeper, which cleans up, and then this process."""

    def end(number: int, frame: FrameType | None) -> None:
        _end(keeper)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _keep(work: Callable[[Workplace], Any], deadline: float, what: str, answers: int) -> None:
    """The main function of the keeper."""
    folder = ""
    worker = 0
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command, too, which ends this process
        end_with_parent(signal.SIGTERM)
        adopt_orphans()
        folder = tempfile.mkdtemp(prefix="megatron_pp_parity")
        reading, writing = os.pipe()
        worker = os.fork()
        if not worker:
            os.close(reading)
            os.close(answers)
            _work(work, Path(folder), writing)
        os.close(writing)
        outcome = _wait(worker, reading, Path(folder), deadline, what)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _clean_up(folder)
        _write_all(answers, outcome)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _clean_up(folder)
        if not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
    finally:
        os._exit(0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the keeper's work: the command does not need the answer any more, or has ended."""
    raise KeyboardInterrupt


def _clean_up(folder: str) -> None:
    kill_descendants(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)


def _write_all(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        pipe.write(data)


def _wait(worker: int, messages: int, folder: Path, deadline: float, what: str) -> bytes:
    """The worker's outcome, pickled."""
    ready, _, _ = select.select([messages], [], [], deadline)
    if not ready:
        return pickle.dumps(_Outcome(error=RunError(f"{what} did not end within {deadline:g} s")))
    prepared = os.read(messages, 1) == _READY
    _, status = os.waitpid(worker, 0)
    file = folder / "outcome"
    if file.exists():
        return file.read_bytes()
    ended = ended_in_words(os.waitstatus_to_exitcode(status))
    doing = "the process that compares" if prepared else what
    return pickle.dumps(_Outcome(error=RunError(f"{doing} {ended}, without an answer")))


def _work(work: Callable[[Workplace], Any], folder: Path, messages: int) -> None:
    """The main function of the worker. The file of its outcome appears complete, or not at all."""
    worker = os.getpid()
    try:
        end_with_parent()
        adopt_orphans()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(2, 1)  # only the answer goes to standard output
        outcome = _outcome_of(work, Workplace(folder, lambda: _tell(messages)))
        if os.getpid() == worker:  # not a process that the script forked and that returned here
            (folder / "outcome.part").write_bytes(pickle.dumps(outcome))
            (folder / "outcome.part").rename(folder / "outcome")
    except BaseException:
        traceback.print_exc()
    finally:
        leave(0)


def _tell(messages: int) -> None:
    os.write(messages, _READY)


def _outcome_of(work: Callable[[Workplace], Any], place: Workplace) -> _Outcome:
    try:
        return _Outcome(work(place))
    except ImportError as error:
        return _Outcome(error=ImportError(str(error), name=error.name))
    except (MegatronPPError, OSError) as error:
        return _Outcome(error=RunError(str(error)))
    except BaseException as error:
        traceback.print_exc()
        return _Outcome(error=RunError(f"the comparison itself failed: {type(error).__name__}: {error}"))
