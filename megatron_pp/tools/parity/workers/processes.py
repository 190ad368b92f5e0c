"""Runs ranks as processes that are forked from this process, which has done their imports, with a deadline.

Processes that a rank has started end with the rank. Orphans of a rank, whose parent has ended, end with the run if this
process adopts orphans (`process_tree.adopt_orphans`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from megatron_pp.comm.bound_stores import bind_stores
from megatron_pp.errors import MegatronPPError
from megatron_pp.tools.parity.workers.ends import RunError, ended_in_words
from megatron_pp.tools.parity.workers.process_tree import (
    adopts_orphans,
    descendants,
    end_with_parent,
    kill_descendants,
    leave,
)

_LINES = 12
_RAISED = 1  # the exit code of a rank whose log ends with a traceback


Result = TypeVar("Result")


def run_ranks(body: Callable[[int], Result], world: int, folder: Path, deadline: float) -> list[Result]:
    """Calls ``body(rank)`` in ``world`` processes that torch.distributed can join, and returns the results. Output and
    results go through files in ``folder``, which no other run may use. Raises RunError with the error of the first rank
    that failed. No process is left.
    """
    context = get_context("fork")
    kept = _free_port()
    port = kept.getsockname()[1]
    before = {os.getpid(), *descendants(os.getpid())}
    processes = [context.Process(target=_rank, args=(body, rank, world, port, folder)) for rank in range(world)]
    try:
        for process in processes:
            process.start()
        _wait_for(processes, folder, time.monotonic() + deadline, deadline)
    finally:
        _end(processes, before)
        kept.close()
    return [pickle.loads((folder / f"rank{rank}.result").read_bytes()) for rank in range(world)]


def _wait_for(processes: Sequence[BaseProcess], folder: Path, end: float, deadline: float) -> None:
    """Waits until all processes have ended without an error. Raises RunError as soon as one fails."""
    waiting = list(processes)
    while waiting:
        ready = wait([process.sentinel for process in waiting], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = [rank for rank, process in enumerate(processes) if process in waiting]
            raise RunError(f"ranks {late} did not end within {deadline:g} s{_last_words(folder, late[0])}")
        for rank, process in enumerate(processes):
            if process in waiting and process.sentinel in ready:
                process.join()
                waiting.remove(process)
                _check(rank, process, folder)


def _check(rank: int, process: BaseProcess, folder: Path) -> None:
    """Raises RunError if an ended rank has no result. The error has the rank's own message, if it has written one."""
    words = folder / f"rank{rank}.error"
    if words.exists():
        raise RunError(f"rank {rank} failed: {words.read_text(errors='replace')}")
    if process.exitcode == _RAISED:
        raise RunError(f"rank {rank} failed{_last_words(folder, rank)}")
    if process.exitcode or not (folder / f"rank{rank}.result").exists():
        raise RunError(f"rank {rank} {ended_in_words(process.exitcode)}{_last_words(folder, rank)}")


def _end(processes: Sequence[BaseProcess], before: set[int]) -> None:
    """Kills the remaining ranks and their descendants. If this process adopts orphans, it also kills its descendants
    that are not in ``before``: ranks have left them. Otherwise other threads may have started them."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            kill_descendants(process.pid)
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()
    if adopts_orphans():
        kill_descendants(os.getpid(), before)


def _rank(body: Callable[[int], object], rank: int, world: int, port: int, folder: Path) -> None:
    process = os.getpid()
    # A garbage collection would destroy objects of the parent, such as a process group in a reference cycle. The
    # destructor of a gloo group waits for threads that a forked process does not have.
    gc.freeze()
    end_with_parent()
    os.register_at_fork(after_in_child=end_with_parent)  # for processes that save checkpoints
    output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROUP_RANK="0",
    )  # fmt: skip
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # for Megatron
    bind_stores()
    code = _RAISED
    try:
        result = pickle.dumps(body(rank))
        if os.getpid() == process:  # otherwise a process that the script forked has returned here
            (folder / f"rank{rank}.result").write_bytes(result)
        code = 0
    except MegatronPPError as error:
        if os.getpid() == process:
            sys.stderr.flush()
            (folder / f"rank{rank}.error").write_text(f"{error}{_last_words(folder, rank)}", errors="replace")
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code if isinstance(ended.code, int) else 1
        if os.getpid() == process:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code & 0xFF)


def _free_port() -> socket.socket:
    """A socket that is bound to a free port, so that no connection gets the port. torch's store shares the address and
    listens there."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return kept


def _last_words(folder: Path, rank: int) -> str:
    with contextlib.suppress(OSError):
        lines = (folder / f"rank{rank}.log").read_text(errors="replace").splitlines()[-_LINES:]
        return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
    return ""
