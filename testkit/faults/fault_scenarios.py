"""Episodes: a pool of real processes makes process groups, runs some steps of the toy model, perhaps with a fault, and
destroys the groups, again and again. Each rank reports what happened, and ``fault_scenario_checks.py`` checks the
reports.

Before the next episode a killed rank is replaced by a new process. A stopped rank is continued when the other ranks
have ended.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from megatron_pp.faults.causes.stall_detector import STOPPED_SECONDS
from megatron_pp.faults.nccl_settings import leave_failures_to_the_guard
from testkit.faults.fault_injection import KILL, STOP, Fault
from testkit.rank_processes import DIED, RankProcesses, RanksTimedOutError

_START_SECONDS = 120.0
_EXIT_SECONDS = 5.0
_MEASURE = "measure"  # the request for a worker's resources, in place of an episode


@dataclass(frozen=True)
class Episode:
    """``steps`` steps of a schedule on all ranks of the pool. ``fault`` happens in one of them, if it is given.

    fields      fields of the config
    sample_every  steps between two samples of the resident memory; 0: none
    seq_length  a message has seq_length * 32 bytes: 3 fits into any socket's buffer, 500,000 into none
    group_timeout  seconds of the process groups; until then a transfer that gloo cannot end holds a thread, its socket
                   and its tensor (see ``comm/gloo/waiting_threads.py``)
    stopped_seconds  seconds after which a stopped rank counts as failed, if ``p2p_timeout`` is not shorter
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
    """The resources of a process after an episode: counts, and resident memory in bytes. ``handles``: those of
    transfers."""

    threads: int
    files: int
    handles: int
    tensors: int
    shared_memory: int
    resident: int


@dataclass(frozen=True)
class Report:
    """The outcome on one rank. ``samples``: resident memory in bytes, every ``sample_every`` steps. ``error``: type
    name, text and attributes of the schedule's exception, None if there is none. ``raised_at``: its time on
    CLOCK_MONOTONIC, one clock for all processes of a machine. ``wrong_steps``: steps whose losses or gradients differ
    from the reference's in any bit."""

    rank: int
    steps_done: int
    seconds: float
    error: tuple[str, str, dict[str, Any]] | None = None
    raised_at: float = 0.0
    wrong_steps: tuple[int, ...] = ()
    fired_at: float | None = None
    resources: Resources | None = None
    samples: tuple[int, ...] = ()


class Pool:
    """``size`` worker processes, and a store that outlives them. It is a context manager: no process outlives it.

    ``start_method``: see ``processes.run_processes``.
    """

    def __init__(self, size: int, start_method: str = "spawn") -> None:
        import torch.distributed as dist

        self.size = size
        self._start_method = start_method
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = RankProcesses()

    def __enter__(self) -> Pool:
        try:
            self._start(range(self.size))
        except BaseException:
            self._ranks.end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        living = set(self.pids()) - set(self._ranks.dead())
        for rank in living:
            os.kill(self.pids()[rank], signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):
                self._ranks.send(rank, None)
        self._ranks.end(_EXIT_SECONDS)

    def run(self, episode: Episode, deadline: float = 60.0) -> dict[int, Report]:
        """Run an episode. Returns every rank's report. That of a killed rank has only the time of its death. Raises
        RanksTimedOutError."""
        self._replace_the_dead()
        for rank in range(self.size):
            self._ranks.send(rank, episode)
        fault = episode.fault
        awaited = set(range(self.size))
        reports: dict[int, Report] = {}
        fired_at: float | None = None
        until = time.monotonic() + deadline
        stopped = fault.rank if fault is not None and fault.kind == STOP else None
        while awaited:
            if stopped is not None and awaited == {stopped}:
                os.kill(self.pids()[stopped], signal.SIGCONT)
                stopped = None
            heard = self._ranks.hear(awaited, until - time.monotonic())
            if not heard:
                raise RanksTimedOutError(awaited, deadline)
            for rank, message in heard:
                if isinstance(message, float):
                    fired_at = message
                    continue
                awaited.discard(rank)
                if message != DIED:
                    reports[rank] = message
        if fault is not None and fault.kind == KILL and fault.rank not in reports:
            reports[fault.rank] = Report(fault.rank, 0, 0.0)
        return {rank: replace(report, fired_at=fired_at) for rank, report in reports.items()}

    def resources(self) -> dict[int, Resources]:
        """The present resources of each rank's process. Raises RanksTimedOutError."""
        self._replace_the_dead()
        for rank in range(self.size):
            self._ranks.send(rank, _MEASURE)
        return dict(sorted(self._ranks.answers(range(self.size), _START_SECONDS)))

    def await_resources(
        self, held: dict[int, Resources], is_fine: Callable[[dict[int, Resources]], bool], seconds: float
    ) -> dict[int, Resources]:
        """``held``, by rank, if it is fine. Otherwise the resources of these ranks as soon as they are fine, or after
        ``seconds``."""
        until = time.monotonic() + seconds
        while not is_fine(held) and time.monotonic() < until:
            time.sleep(0.5)
            held = {rank: now for rank, now in self.resources().items() if rank in held}
        return held

    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        return self._ranks.pids()

    def _start(self, ranks: Iterable[int]) -> None:
        """Start processes for ``ranks``. Raises RanksTimedOutError if one is not ready in time."""
        ranks = list(ranks)
        for rank in ranks:
            self._ranks.start(rank, _work, (rank, self.size, self._store.port), self._start_method)
        failed = [rank for rank, message in self._ranks.answers(ranks, _START_SECONDS) if message != "ready"]
        if failed:
            raise RanksTimedOutError(failed, _START_SECONDS)

    def _replace_the_dead(self) -> None:
        dead = self._ranks.dead()
        for rank in dead:
            self._ranks.end_one(rank)
        self._start(dead)


# -- in the worker -----------------------------------------------------------------------------------------------------


def _work(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # If several ranks share a GPU, each claims its own host, because NCCL refuses to share a GPU within one host.
    os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NET", "Socket")
    leave_failures_to_the_guard()
    import torch
    import torch.distributed as dist

    from testkit.faults.fault_scenario_worker import run_episode

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    gc.freeze()  # collections after each episode skip objects of libraries
    pipe.send("ready")
    while (episode := pipe.recv()) is not None:
        if episode == _MEASURE:
            pipe.send(measure_resources())
            continue
        report = run_episode(episode, rank, size, store, lambda: pipe.send(time.monotonic()))
        pipe.send(replace(report, resources=measure_resources()))
    sys.stdout.flush()


def measure_resources() -> Resources:
    """The resources of this process, after a garbage collection (Linux)."""
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
    """The files in /dev/shm that this process has mapped, or that torch has left there under its process id. The folder
    has files of all processes of the machine."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if " /dev/shm/" in line}
    return mapped | set(glob.glob(f"/dev/shm/torch_{os.getpid()}_*"))


def resident_bytes() -> int:
    """The memory of this process in RAM, in bytes (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
