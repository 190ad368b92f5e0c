"""One process with a pipe for each rank. Messages have a deadline, and the processes always end.

The caller decides the work of a process and its messages: one call and its result (``processes.run_processes``), jobs
one after the other (``megatron/runner.py``), or episodes in which ranks are killed and replaced
(``fault_scenarios.Pool``).
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

from megatron_pp.errors import MegatronPPError

PRELOADED = ["testkit.preload"]
"""For ``multiprocessing.set_forkserver_preload``: the modules that are loaded in forked ranks."""
OTHER_SERVER = "other server"
"""A start method: fork from a second server, whose interpreter has another hash seed."""
DIED = "the process ended without a word"
"""Replaces a message: the process has ended."""


class RanksTimedOutError(MegatronPPError, RuntimeError):
    """Ranks (``ranks``) sent no message by the deadline."""

    def __init__(self, ranks: Iterable[int], seconds: float) -> None:
        self.ranks = tuple(sorted(ranks))
        super().__init__(f"rank(s) {list(self.ranks)} had not answered after {seconds:g} s")


class RankProcesses:
    """Processes by rank. ``end`` must always be called."""

    def __init__(self) -> None:
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}

    def start(
        self, rank: int, body: Callable[..., None], args: Sequence[Any] = (), start_method: str = "spawn"
    ) -> None:
        """Run ``body(pipe, *args)`` in a process. ``start_method``: multiprocessing's, or OTHER_SERVER."""
        method = "forkserver" if start_method == OTHER_SERVER else start_method
        context: Any = multiprocessing.get_context(method)
        here, there = context.Pipe()
        process = context.Process(target=_be_a_rank, args=(body, there, *args), daemon=True)
        with _other_server_asked() if start_method == OTHER_SERVER else contextlib.nullcontext():
            process.start()
        there.close()
        self._processes[rank] = process
        self._pipes[rank] = here

    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        return [rank for rank, process in self._processes.items() if not process.is_alive()]

    def send(self, rank: int, message: Any) -> None:
        """Send a message to a rank. Raises BrokenPipeError if its process has ended."""
        self._pipes[rank].send(message)

    def hear(self, ranks: Iterable[int], seconds: float) -> list[tuple[int, Any]]:
        """(rank, message) of those of ``ranks`` that send a message first. The message is DIED if a process has ended.
        Empty after ``seconds``."""
        asked = {self._pipes[rank]: rank for rank in ranks}
        ready = wait(list(asked), max(0.0, seconds))
        return [(rank, self._message(rank)) for pipe, rank in asked.items() if pipe in ready]

    def answers(self, ranks: Iterable[int], seconds: float) -> Iterator[tuple[int, Any]]:
        """(rank, message): the next message of each of ``ranks``, in the order of arrival. Raises
        RanksTimedOutError."""
        waiting = set(ranks)
        until = time.monotonic() + seconds
        while waiting:
            heard = self.hear(waiting, until - time.monotonic())
            if not heard:
                raise RanksTimedOutError(waiting, seconds)
            waiting -= {rank for rank, _ in heard}
            yield from heard

    def _message(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return DIED

    def end(self, patience: float = 0.0) -> None:
        """End all processes. Those that have not ended by themselves after ``patience`` seconds are killed."""
        until = time.monotonic() + patience
        for process in self._processes.values():
            process.join(max(0.0, until - time.monotonic()))
        for process in self._processes.values():
            process.kill()
        for rank in list(self._processes):
            self.end_one(rank)

    def end_one(self, rank: int, patience: float = 0.0) -> None:
        """End the process of one rank, which can then be started again."""
        process = self._processes.pop(rank)
        process.join(patience)
        process.kill()
        process.join()
        process.close()
        self._pipes.pop(rank).close()


def _be_a_rank(body: Callable[..., None], *args: Any) -> None:
    """Run ``body`` under a policy in which a thread that wakes up does not take the core of the thread that woke it.

    gloo writes to a socket while it holds a lock. Its event loop, woken by that write, polls until it gets the lock. If
    it has taken the writer's core, both wait for the end of a time slice, which costs half of the CPU time of ranks
    that exchange many small messages.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # where a container forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    body(*args)


@contextlib.contextmanager
def _other_server_asked() -> Iterator[None]:
    with patch.object(forkserver, "connect_to_new_process", _other_server().connect_to_new_process):
        yield


@functools.cache
def _other_server() -> forkserver.ForkServer:
    """A second process from which ranks are forked, with its own interpreter. It ends with this process."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    return server
