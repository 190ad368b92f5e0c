"""Ranks as threads of one process, with any transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class ThreadGroup:
    """The pipeline group of ranks that are threads."""

    _rank: int
    _size: int

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def run_ranks(
    size: int, rank_main: Callable[[int], T], on_failure: Callable[[str], None] | None = None, timeout: float = 60.0
) -> list[T]:
    """Run ``rank_main(rank)`` in a thread per rank and return the results in rank order.

    Raises the first exception of any rank, after ``on_failure`` (called with its text, to unblock the others); raises
    TimeoutError where ranks are still running after ``timeout`` seconds.
    """
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
    if errors:
        raise errors[0]
    running = [thread.name for thread in threads if thread.is_alive()]
    if running:
        if on_failure is not None:
            on_failure("timed out")
        raise TimeoutError(f"{', '.join(running)} still running after {timeout} s")
    return results
