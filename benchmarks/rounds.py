"""Timing in turns: each round runs every engine once, and begins with another engine."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext


def timed_rounds(
    steps: Mapping[str, Callable[[], None]],
    rounds: int,
    warmup: int = 1,
    before_each: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    around: Callable[[str], AbstractContextManager[None]] = nullcontext,
    settling: int = 0,
) -> dict[str, list[float]]:
    """The seconds of each step in each round. ``before_each`` (a barrier) and the work of ``around(name)`` before and
    after a step are not counted. The garbage collector is off while a step runs, and runs between steps.

    ``settling``: steps that run in ``around(name)`` before the timed one. A context that replaces functions, as
    `install()` does, makes the next step's host time some 10% longer, because Python must look up cached names again.

    ``clock``: if the calling thread does all work, ``time.thread_time`` leaves out the time of other processes.
    """
    names = list(steps)
    for _ in range(warmup):
        for name in names:
            with around(name):
                if before_each is not None:
                    before_each()
                steps[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # collections between steps skip loaded objects
    for number in range(rounds):
        start = number % max(1, len(names))
        for name in names[start:] + names[:start]:
            with around(name):
                for _ in range(settling):
                    steps[name]()
                gc.collect()
                gc.disable()
                if before_each is not None:
                    before_each()
                began = clock()
                steps[name]()
                seconds[name].append(clock() - began)
            gc.enable()
    gc.unfreeze()
    return seconds


def print_progress(rank: int, done: int, of: int, label: str, seconds: Mapping[str, list[float]]) -> None:
    """Print the results so far to stderr, on rank 0: these runs are long, and may be interrupted."""
    if rank == 0:
        figures = ", ".join(f"{name} {summary(times, 1e3)['median']:.0f} ms" for name, times in seconds.items())
        print(f"[{done}/{of}] {label}: {figures}", file=sys.stderr, flush=True)


def slowest_rank(per_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The step times of the pipeline: in each round, that of the slowest rank."""
    return {name: [max(times) for times in zip(*(r[name] for r in per_rank), strict=True)] for name in per_rank[0]}


def summary(seconds: list[float], scale: float = 1.0) -> dict[str, float]:
    return {"min": min(seconds) * scale, "median": statistics.median(seconds) * scale}


def beside_bound(seconds: list[float], bound: float) -> dict[str, float]:
    """The columns of a table for an engine's rounds. ``bound`` is the lower bound of a step, in seconds."""
    times = summary(seconds, 1e3)
    return {"ms (min)": times["min"], "ms (median)": times["median"], "over bound": times["median"] / (bound * 1e3)}
