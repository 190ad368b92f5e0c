"""Timing in turns: every round runs every engine once, each round beginning with another one."""

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
    """Seconds of each step in each round. ``before_each`` (a barrier) and what ``around(name)`` does before and after a
    step are not counted. The garbage collector is off while a step runs, and runs between steps.

    ``settling``: steps that run in ``around(name)`` before the one that is timed. A context that replaces functions,
    as `install()` does, costs the step behind it some 10% of its host time: Python looks up anew what it had cached.

    ``clock``: where all work is done by the calling thread, ``time.thread_time`` leaves out what other processes take.
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
    gc.freeze()  # what is loaded is not looked through again between steps
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
    """Rank 0 prints its results so far to stderr: these runs are long, and may be interrupted."""
    if rank == 0:
        figures = ", ".join(f"{name} {summary(times, 1e3)['median']:.0f} ms" for name, times in seconds.items())
        print(f"[{done}/{of}] {label}: {figures}", file=sys.stderr, flush=True)


def slowest_rank(per_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Step times of the pipeline: of each round, those of the rank that took longest."""
    return {name: [max(times) for times in zip(*(r[name] for r in per_rank), strict=True)] for name in per_rank[0]}


def summary(seconds: list[float], scale: float = 1.0) -> dict[str, float]:
    return {"min": min(seconds) * scale, "median": statistics.median(seconds) * scale}


def beside_bound(seconds: list[float], bound: float) -> dict[str, float]:
    """A table's columns of an engine's rounds beside the step that no engine can be below, all in seconds."""
    times = summary(seconds, 1e3)
    return {"ms (min)": times["min"], "ms (median)": times["median"], "over bound": times["median"] / (bound * 1e3)}
