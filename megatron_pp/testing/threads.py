"""Ranks as threads of one process, with any transport."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class ThreadGroup:
    _rank: int
    _size: int

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def run_ranks(
    size: int, rank_main: Callable[[int], T], on_failure: Callable[[str], None] | None = None, timeout: float = 60.0
) -> list[T]:
    """Run ``rank_main(rank)`` in a thread per rank and return the results in rank order. Raises the first exception of
    any rank, after ``on_failure`` (called with its text, to unblock the others). Raises TimeoutError if ranks are still
    running after ``timeout`` seconds."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = rank_main(rank)
        except BaseException as error:  # raised below
            errors.append(error)
            if on_failure is not None:
                on_failure(f"rank {rank}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:  # a rank that was unblocked may get here before the one that failed
        raise next((error for error in errors if "aborted: rank " not in str(error)), errors[0])
    running = [thread.name for thread in threads if thread.is_alive()]
    if running:
        if on_failure is not None:
            on_failure("timed out")
        raise TimeoutError(f"{', '.join(running)} still running after {timeout} s")
    return results


class Turns:
    """Schedules ``size`` threads, one for each rank. Inside ``running(rank)`` exactly one runs at any time, and a seed
    chooses the next. So a run depends only on the seed, and a deadlock is detected immediately, without a timeout.

    ``when_stuck()`` is called when every thread waits. It returns whether it has made progress. If it has not, every
    ``wait_until`` returns although its condition does not hold."""

    def __init__(self, size: int, rng: random.Random, when_stuck: Callable[[], bool]) -> None:
        self.size = size
        self.rng = rng
        self.when_stuck = when_stuck
        self.given_up = False
        self._gates = [threading.Lock() for _ in range(size)]  # one per rank, released for one turn of the rank
        for gate in self._gates:
            gate.acquire()
        self._ready: dict[int, Callable[[], bool]] = {}  # rank that is not running -> whether it can run
        self._entering = threading.Lock()
        self._entered = 0

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """Run the current thread as ``rank``. Starts when all ranks have entered."""
        self._ready[rank] = _always
        with self._entering:
            self._entered += 1
            all_entered = self._entered == self.size
        if all_entered:
            self._next()
        self._gates[rank].acquire()
        try:
            yield
        finally:
            self._next()

    def give_way(self, rank: int) -> None:
        """Let the seed choose the next rank. It may choose this rank again."""
        self._sleep(rank, _always)

    def wait_until(self, rank: int, ready: Callable[[], bool]) -> bool:
        """Sleep until ``ready()``. Returns False if no rank can make progress."""
        if not ready():
            self._sleep(rank, ready)
        return ready()

    def give_up(self) -> None:
        """Wake all ranks, one after the other, after a failure."""
        self.given_up = True

    def _sleep(self, rank: int, ready: Callable[[], bool]) -> None:
        self._ready[rank] = ready
        self._next()
        self._gates[rank].acquire()

    def _next(self) -> None:
        """Let the seed choose among the ranks that can run, and run one."""
        while self._ready:
            able = [rank for rank in sorted(self._ready) if self.given_up or self._ready[rank]()]
            if able:
                chosen = able[self.rng.randrange(len(able))] if len(able) > 1 else able[0]
                del self._ready[chosen]
                self._gates[chosen].release()
                return
            if not self.when_stuck():
                self.given_up = True


def _always() -> bool:
    return True
