"""Ranks of a run as processes that are forked from this one, which has imported what they need; with a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar

from megatron_pp.errors import MegatronPPError

_PR_SET_PDEATHSIG = 1
_LINES = 12


class RunError(MegatronPPError, RuntimeError):
    """A run that a comparison needs did not end: a rank raised, died, or missed the deadline."""


Result = TypeVar("Result")


def run_ranks(body: Callable[[int], Result], world: int, folder: Path, deadline: float) -> list[Result]:
    """Call ``body(rank)`` in ``world`` processes that torch.distributed can join, and return what the calls returned.
    Output and results go through files in ``folder``, which is this process's own. Raises RunError with the error of
    the first rank that failed; no process is left.
    """
    context = get_context("fork")
    end = time.monotonic() + deadline
    kept = _free_port()
    port = kept.getsockname()[1]
    processes = [context.Process(target=_rank, args=(body, rank, world, port, folder)) for rank in range(world)]
    try:
        for process in processes:
            process.start()
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
                    if process.exitcode:
                        raise RunError(f"rank {rank} failed{_last_words(folder, rank)}")
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join()
        kept.close()
    return [pickle.loads((folder / f"rank{rank}.result").read_bytes()) for rank in range(world)]


def _rank(body: Callable[[int], object], rank: int, world: int, port: int, folder: Path) -> None:
    end_with_parent()
    os.register_at_fork(after_in_child=end_with_parent)  # of processes that save checkpoints
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
    code = 1
    try:
        (folder / f"rank{rank}.result").write_bytes(pickle.dumps(body(rank)))
        code = 0
    except SystemExit as ended:
        traceback.print_exc()
        code = 0 if not ended.code else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def end_with_parent() -> None:
    """Have the kernel (Linux) kill this process when the one that forked it has ended, however that was: gloo's threads
    keep a core busy in ranks that nobody waits for."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> socket.socket:
    """Bound, so that no connection takes the port meanwhile; torch's store shares the address and listens there."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return kept


def _last_words(folder: Path, rank: int) -> str:
    with contextlib.suppress(OSError):
        lines = (folder / f"rank{rank}.log").read_text(errors="replace").splitlines()[-_LINES:]
        return ":\n" + "\n".join(f"  {line}" for line in lines)
    return ""
