"""Runs ranks as real processes with a deadline. Returns their results or raises their errors, and always ends the
processes.

    results = run_processes(rank_main, 4, args=(...), timeout=60)

``rank_main(rank, size, *args)`` must be a module-level function, because processes import it. A process group of the
given backend is initialised before it and destroyed after it. It uses a FileStore, so no port is needed.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from megatron_pp.errors import MegatronPPError
from testkit.autograd_draw import follow, for_processes
from testkit.rank_processes import DIED, OTHER_SERVER, RankProcesses, RanksTimedOutError

_END_SECONDS = 0.5


class RankFailedError(MegatronPPError, RuntimeError):
    """A rank raised. The message has its traceback. ``errors``: failed rank -> (type name, text) of its exception.
    ``results``: returned rank -> its result.
    """

    def __init__(self, message: str, errors: dict[int, tuple[str, str]], results: dict[int, Any]) -> None:
        super().__init__(message)
        self.errors = errors
        self.results = results


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
    patience: float = 5.0,
) -> list[Any]:
    """Run ``rank_main(rank, size, *args)`` in ``size`` processes and return the results (picklable) in rank order.

    ``backend`` None leaves process groups to ``rank_main``. ``start_method`` is multiprocessing's. "spawn" starts every
    rank as a launcher does. "forkserver", after ``multiprocessing.set_forkserver_preload(["torch"])``, takes a
    twentieth of the time. But then all ranks share one hash seed, so that no test shows a dependence on the order of
    sets, and ``environment`` comes too late for the interpreter. "mixed" forks the last rank from a second server,
    which has another hash seed and so another order of sets. A sequence has one method for each rank. Raises
    RankFailedError ``patience`` seconds after a rank has raised, so that other ranks can report too, and
    RanksTimedOutError at the deadline. No process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="megatron_pp_ranks_") as folder:
        store = os.path.join(folder, "store")
        ranks = RankProcesses()
        try:
            for rank, method in enumerate(_methods(start_method, size)):
                setup = _Setup(rank, size, backend, store, group_timeout, {**for_processes(), **(environment or {})})
                ranks.start(rank, _rank_process, (setup, rank_main, tuple(args)), method)
            return _collect(ranks, size, timeout, patience)
        finally:
            ranks.end(_END_SECONDS)


def _methods(start_method: str | Sequence[str], size: int) -> Sequence[str]:
    """The start method of each rank."""
    if start_method == "mixed":
        return ["forkserver"] * (size - 1) + [OTHER_SERVER]
    return [start_method] * size if isinstance(start_method, str) else start_method


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
    except BaseException as error:  # sent as text, because some exceptions cannot be pickled
        message = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    try:
        pipe.send_bytes(pickle.dumps(message))
    except BrokenPipeError:
        pass
    finally:
        pipe.close()
    if message[0] == "error":
        os._exit(1)  # a broken process group may hang in its destructors


def _collect(ranks: RankProcesses, size: int, timeout: float, patience: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, tuple[str, str, str]] = {}
    waiting = set(range(size))
    deadline = time.monotonic() + timeout
    while waiting:
        left = deadline - time.monotonic()
        heard = ranks.hear(waiting, min(left, patience) if errors else left)
        if not heard:
            break
        for rank, message in heard:
            waiting.discard(rank)
            if message == DIED:
                message = ("error", ("ProcessDied", "the process ended without a result", "no traceback"))
            kind, value = message
            (results if kind == "result" else errors)[rank] = value
    if errors:
        first = min(errors)
        text = "\n".join(f"rank {rank}: {name}: {why}" for rank, (name, why, _) in sorted(errors.items()))
        said = {rank: (name, why) for rank, (name, why, _) in errors.items()}
        raise RankFailedError(f"{text}\n\nof rank {first}:\n{errors[first][2]}", said, results)
    if waiting:
        raise RanksTimedOutError(waiting, timeout)
    return [results[rank] for rank in range(size)]
