"""Ranks as real processes: started with a deadline, always reaped; returns their results or raises their errors.

    results = run_processes(rank_main, 4, args=(...), timeout=60)

``rank_main(rank, size, *args)`` must be importable (a module-level function): processes do not inherit it. A process
group of the given backend is initialised before it, over a FileStore, so no port is chosen, and destroyed after it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple
from unittest.mock import patch

from megatron_pp.errors import MegatronPPError
from testkit.autograd_draw import follow, for_processes

_JOIN_SECONDS = 5.0
PRELOADED = ["testkit.preload"]
"""For ``multiprocessing.set_forkserver_preload``: what ranks are forked with."""
_OTHER_SERVER = "other server"


class RankFailedError(MegatronPPError, RuntimeError):
    """A rank raised; the message has its traceback. ``errors`` maps every rank that failed to its exception's (type
    name, text), ``results`` those that had returned to what they gave.
    """

    def __init__(self, message: str, errors: dict[int, tuple[str, str]], results: dict[int, Any]) -> None:
        super().__init__(message)
        self.errors, self.results = errors, results


class RanksTimedOutError(MegatronPPError, RuntimeError):
    """Ranks were still running at the deadline and were killed."""


def run_processes(
    rank_main: Callable[..., Any],
    size: int,
    args: Sequence[Any] = (),
    *,
    timeout: float = 60.0,
    backend: str | None = "gloo",
    environment: dict[str, str] | None = None,
    group_timeout: float = 120.0,
    start_method: str | Sequence[str] = "spawn",
    patience: float = _JOIN_SECONDS,
) -> list[Any]:
    """Run ``rank_main(rank, size, *args)`` in ``size`` processes and return the results (picklable) in rank order.

    ``backend`` None leaves process groups to ``rank_main``. ``start_method`` is multiprocessing's: "spawn" starts
    every rank as a launcher does; "forkserver", after ``multiprocessing.set_forkserver_preload(["torch"])``, in a
    twentieth of the time, but then all ranks share one hash seed (no dependence on the order of a set shows), and
    ``environment`` comes too late for the interpreter. "mixed" forks the last rank from a second server, which has
    another hash seed: sets have one order there and another here. A sequence has one method for each rank. Raises
    RankFailedError as soon as a rank has raised (``patience`` seconds later, for what the others give),
    RanksTimedOutError at the deadline; no process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="megatron_pp_ranks_") as folder:
        store = os.path.join(folder, "store")
        processes, pipes = [], []
        for rank, method in enumerate(_methods(start_method, size)):
            context: Any = multiprocessing.get_context("forkserver" if method == _OTHER_SERVER else method)
            here, there = context.Pipe(duplex=False)
            setup = _Setup(rank, size, backend, store, group_timeout, {**for_processes(), **(environment or {})})
            process = context.Process(target=_rank_process, args=(there, setup, rank_main, tuple(args)), daemon=True)
            _start(process, method)
            there.close()
            processes.append(process)
            pipes.append(here)
        try:
            return _collect(pipes, timeout, patience)
        finally:
            for process in processes:
                _reap(process)


def _methods(start_method: str | Sequence[str], size: int) -> Sequence[str]:
    """Of each rank."""
    if start_method == "mixed":
        return ["forkserver"] * (size - 1) + [_OTHER_SERVER]
    return [start_method] * size if isinstance(start_method, str) else start_method


def _start(process: Any, method: str) -> None:
    if method != _OTHER_SERVER:
        process.start()
        return
    with patch.object(forkserver, "connect_to_new_process", _other_server().connect_to_new_process):
        process.start()


@functools.cache
def _other_server() -> forkserver.ForkServer:
    """A second process to fork ranks from, with an interpreter of its own. It ends with this process."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    return server


class _Setup(NamedTuple):
    """The set-up of a rank, before ``rank_main``."""

    rank: int
    size: int
    backend: str | None
    store: str
    group_timeout: float
    environment: dict[str, str]


def _rank_process(pipe: Connection, setup: _Setup, rank_main: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", **setup.environment})
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        follow()
        if setup.backend is not None:
            store = dist.FileStore(setup.store, setup.size)
            dist.init_process_group(
                setup.backend,
                store=store,
                rank=setup.rank,
                world_size=setup.size,
                timeout=timedelta(seconds=setup.group_timeout),
            )
        result = rank_main(setup.rank, setup.size, *args)
        if setup.backend is not None and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        message: tuple[str, Any] = ("result", result)
    except BaseException as error:  # sent as text: not every exception can be pickled
        message = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    try:
        pipe.send_bytes(pickle.dumps(message))
    except BrokenPipeError:
        pass
    finally:
        pipe.close()
    if message[0] == "error":
        os._exit(1)  # a broken process group may hang in its destructors


def _collect(pipes: list[Connection], timeout: float, patience: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, tuple[str, str, str]] = {}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout
    while open_pipes:
        left = deadline - time.monotonic()
        if errors:
            left = min(left, patience)
        ready = wait(list(open_pipes), max(0.0, left))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                kind, value = "error", ("ProcessDied", "the process ended without a result", "no traceback")
            (results if kind == "result" else errors)[rank] = value
    if errors:
        first = min(errors)
        text = "\n".join(f"rank {rank}: {name}: {why}" for rank, (name, why, _) in sorted(errors.items()))
        said = {rank: (name, why) for rank, (name, why, _) in errors.items()}
        raise RankFailedError(f"{text}\n\nof rank {first}:\n{errors[first][2]}", said, results)
    if open_pipes:
        raise RanksTimedOutError(
            f"rank(s) {sorted(open_pipes.values())} were still running after {timeout} s and were killed"
        )
    return [results[rank] for rank in range(len(pipes))]


def _reap(process: Any) -> None:
    process.join(0.5)
    for stop in (process.terminate, process.kill):
        if not process.is_alive():
            break
        stop()
        process.join(_JOIN_SECONDS)
    process.join()
    process.close()
