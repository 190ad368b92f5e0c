"""Episodes: a pool of real processes makes process groups, runs some steps of the toy model, perhaps with a fault, and
takes the groups down again, over and over. What each rank met is reported and judged by ``fault_scenario_checks.py``.

A rank that was killed is replaced by a new process before the next episode; one that was stopped is continued when the
others are through.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_pp.faults.nccl_settings import leave_failures_to_the_guard
from megatron_pp.faults.stall_detector import STOPPED_SECONDS
from testkit.fault_injection import KILL, STOP, Fault

_START_SECONDS = 120.0
_EXIT_SECONDS = 5.0
_MEASURE = "measure"  # asks a worker for its resources, in place of an episode


@dataclass(frozen=True)
class Episode:
    """``steps`` steps of a schedule on all ranks of the pool; ``fault`` may happen in one of them.

    fields      of the config
    sample_every  steps between two looks at the resident memory; 0: none
    seq_length  of a message of seq_length * 32 bytes: 3 fits into any socket's buffer, 500,000 into none
    group_timeout  seconds, of the process groups; so long a transfer that gloo cannot end holds a thread, a connection
                   and its tensor (see ``comm/gloo/waiting_threads.py``)
    stopped_seconds  after which a rank that is stopped is given up, if ``p2p_timeout`` does not come before
    """

    number: int
    schedule: str
    chunks: int
    microbatches: int
    steps: int
    fault: Fault | None = None
    p2p_timeout: float = 5.0
    backend: str = "gloo"
    seq_length: int = 3
    fields: dict[str, Any] = field(default_factory=dict)
    sample_every: int = 0
    group_timeout: float = 90.0
    stopped_seconds: float = STOPPED_SECONDS


@dataclass(frozen=True)
class Resources:
    """What a process holds after an episode; counts, and resident memory in bytes. ``handles``: of transfers."""

    threads: int
    files: int
    handles: int
    tensors: int
    shared_memory: int
    resident: int


@dataclass(frozen=True)
class Report:
    """What one rank met. ``samples``: resident memory, in bytes, every so many steps. ``error``: type name, text and
    attributes of what the schedule raised, None if nothing; ``raised_at``: CLOCK_MONOTONIC (one clock for all
    processes of a machine), when; ``wrong_steps``: steps whose losses or gradients are not the reference's, to the
    last bit."""

    rank: int
    steps_done: int
    seconds: float
    error: tuple[str, str, dict[str, Any]] | None = None
    raised_at: float = 0.0
    wrong_steps: tuple[int, ...] = ()
    fired_at: float | None = None
    resources: Resources | None = None
    samples: tuple[int, ...] = ()


class HungError(RuntimeError):
    """Ranks did not answer by the deadline: what must never happen."""

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        super().__init__(f"ranks {list(ranks)} hang: no report after {seconds:.0f} s")
        self.ranks = tuple(ranks)


class Pool:
    """``size`` worker processes and the store that outlives them. Use as a context manager: no process outlives it.

    ``start_method``: see ``processes.run_processes``.
    """

    def __init__(self, size: int, start_method: str = "spawn") -> None:
        import torch.distributed as dist

        self.size = size
        self._context: Any = multiprocessing.get_context(start_method)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}

    def __enter__(self) -> Pool:
        for rank in range(self.size):
            self._start(rank)
        self._await_ready(range(self.size))
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in list(self._workers):
            self._end(rank)

    def run(self, episode: Episode, deadline: float = 60.0) -> dict[int, Report]:
        """Every rank's report; none of a rank that was killed, except for the time when it was. Raises HungError."""
        self._replace_the_dead()
        for pipe in self._pipes.values():
            pipe.send(episode)
        fault = episode.fault
        awaited = set(range(self.size))
        reports: dict[int, Report] = {}
        fired_at: float | None = None
        until = time.monotonic() + deadline
        stopped = fault.rank if fault is not None and fault.kind == STOP else None
        while awaited:
            if stopped is not None and awaited == {stopped}:
                os.kill(self._workers[stopped].pid, signal.SIGCONT)
                stopped = None
            ready = wait([self._pipes[rank] for rank in awaited], max(0.0, until - time.monotonic()))
            if not ready:
                raise HungError(sorted(awaited), deadline)
            for rank in [rank for rank in awaited if self._pipes[rank] in ready]:
                message = self._receive(rank)
                if isinstance(message, float):
                    fired_at = message
                    continue
                awaited.discard(rank)
                if message is not None:
                    reports[rank] = message
        if fault is not None and fault.kind == KILL and fault.rank not in reports:
            reports[fault.rank] = Report(fault.rank, 0, 0.0)
        return {rank: replace(report, fired_at=fired_at) for rank, report in reports.items()}

    def resources(self) -> dict[int, Resources]:
        """What each rank's process holds now. Raises HungError."""
        self._replace_the_dead()
        for pipe in self._pipes.values():
            pipe.send(_MEASURE)
        return {rank: self._answer(rank) for rank in self._pipes}

    def await_resources(
        self, held: dict[int, Resources], is_fine: Callable[[dict[int, Resources]], bool], seconds: float
    ) -> dict[int, Resources]:
        """``held``, by rank, or what these ranks hold when that is fine; if it never is, after ``seconds``."""
        until = time.monotonic() + seconds
        while not is_fine(held) and time.monotonic() < until:
            time.sleep(0.5)
            held = {rank: now for rank, now in self.resources().items() if rank in held}
        return held

    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        return {rank: worker.pid for rank, worker in self._workers.items()}

    def _answer(self, rank: int) -> Any:
        """What ``rank`` says, within the time that a process may take to start."""
        if not self._pipes[rank].poll(_START_SECONDS):
            raise HungError([rank], _START_SECONDS)
        return self._receive(rank)

    def _receive(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return None

    def _start(self, rank: int) -> None:
        here, there = self._context.Pipe()
        worker = self._context.Process(target=_work, args=(there, rank, self.size, self._store.port), daemon=True)
        worker.start()
        there.close()
        self._workers[rank], self._pipes[rank] = worker, here

    def _await_ready(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self._answer(rank) != "ready":
                raise HungError([rank], _START_SECONDS)

    def _replace_the_dead(self) -> None:
        dead = [rank for rank, worker in self._workers.items() if not worker.is_alive()]
        for rank in dead:
            self._end(rank)
            self._start(rank)
        self._await_ready(dead)

    def _end(self, rank: int) -> None:
        worker = self._workers.pop(rank)
        pipe = self._pipes.pop(rank)
        if worker.is_alive():
            os.kill(worker.pid, signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
            worker.join(_EXIT_SECONDS)
        if worker.is_alive():
            worker.kill()
        worker.join()
        worker.close()
        pipe.close()


# -- in the worker -----------------------------------------------------------------------------------------------------


def _work(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Where several ranks have to share a GPU: NCCL refuses that within one host, so each rank claims a host of its own.
    os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NET", "Socket")
    leave_failures_to_the_guard()
    import torch
    import torch.distributed as dist

    from testkit.fault_scenario_worker import run_episode

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    gc.freeze()  # what libraries hold need not be looked through after each episode
    pipe.send("ready")
    while (episode := pipe.recv()) is not None:
        if episode == _MEASURE:
            pipe.send(measure_resources())
            continue
        report = run_episode(episode, rank, size, store, lambda: pipe.send(time.monotonic()))
        pipe.send(replace(report, resources=measure_resources()))
    sys.stdout.flush()


def measure_resources() -> Resources:
    """Of this process, after a collection (Linux)."""
    import torch

    from megatron_pp.comm.wait_handle import WaitHandle

    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    return Resources(
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        handles=sum(number for kind, number in kinds.items() if issubclass(kind, WaitHandle)),
        tensors=sum(number for kind, number in kinds.items() if issubclass(kind, torch.Tensor)),
        shared_memory=len(_shared_memory()),
        resident=resident_bytes(),
    )


def _shared_memory() -> set[str]:
    """The files in /dev/shm that this process has mapped, or that torch has left there in its name. The folder has
    those of all processes of the machine."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if " /dev/shm/" in line}
    return mapped | set(glob.glob(f"/dev/shm/torch_{os.getpid()}_*"))


def resident_bytes() -> int:
    """Memory of this process that lies in RAM (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
