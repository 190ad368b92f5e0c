"""Waits of ranks' threads, and the core on which they run, so that switches between threads take little time.

Python runs one thread at a time, whatever the number of cores. torch releases the interpreter lock in each operation.
So threads on several cores take the lock from each other at each operation. On one core a thread keeps it until it
waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class OwnConditions(threading.Condition):
    """A condition variable. ``notify_all`` wakes only the threads whose ``wait_for`` condition holds."""

    def __init__(self) -> None:
        self._shared = threading.RLock()
        super().__init__(self._shared)
        self._waiting: dict[threading.Condition, Callable[[], object]] = {}

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        own = threading.Condition(self._shared)
        self._waiting[own] = predicate
        try:
            return own.wait_for(predicate, timeout)
        finally:
            del self._waiting[own]

    def notify_all(self) -> None:
        for own, predicate in self._waiting.items():
            if predicate():
                own.notify()


@contextmanager
def on_one_core() -> Iterator[None]:
    """A context in which this thread, and threads that it starts, run on one core, the same for the whole process. Test
    workers get different cores in turn."""
    if not hasattr(os, "sched_setaffinity"):  # outside of Linux
        yield
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    number = os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw")
    os.sched_setaffinity(0, {cores[int(number) % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
