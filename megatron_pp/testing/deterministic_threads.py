"""Threads that take turns: exactly one runs at any time, and a seed decides which one is next.

What happens is then a function of the seed, whatever the machine is doing, and that nothing can move any more is seen
at once, without a clock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """Takes ``size`` threads, each of which runs as one rank inside ``running(rank)``.

    ``when_stuck()`` is called when every thread waits for something; it makes something happen and returns True, or
    returns False: then all ``wait_until`` return although their condition does not hold.
    """

    def __init__(self, size: int, rng: random.Random, when_stuck: Callable[[], bool]) -> None:
        self.size = size
        self.rng = rng
        self.when_stuck = when_stuck
        self.given_up = False
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._ready: dict[int, Callable[[], bool]] = {}  # rank that is not running -> whether it could go on
        self._entering = threading.Lock()
        self._entered = 0

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """The current thread is ``rank`` inside. Nobody starts before all have come."""
        self._ready[rank] = _always
        with self._entering:
            self._entered += 1
            everybody = self._entered == self.size
        if everybody:
            self._next()
        self._gates[rank].acquire()
        try:
            yield
        finally:
            self._next()

    def give_way(self, rank: int) -> None:
        """Let the seed choose who goes on, this rank included."""
        self._sleep(rank, _always)

    def wait_until(self, rank: int, ready: Callable[[], bool]) -> bool:
        """Sleep until ``ready()``. False where nothing can move any more and it does not hold."""
        if not ready():
            self._sleep(rank, ready)
        return ready()

    def give_up(self) -> None:
        """Wake everybody, one after the other: something failed."""
        self.given_up = True

    def _sleep(self, rank: int, ready: Callable[[], bool]) -> None:
        self._ready[rank] = ready
        self._next()
        self._gates[rank].acquire()

    def _next(self) -> None:
        """Hand the turn to one that can go on; nobody is left to, once all have ended."""
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
