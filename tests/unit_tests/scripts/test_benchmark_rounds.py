"""Rounds of a benchmark: what is timed, and what runs before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.rounds import timed_rounds


@pytest.mark.parametrize("settling", [0, 1, 2])
def test_steps_that_settle_run_in_their_engines_context_and_are_not_timed(settling: int) -> None:
    log: list[str] = []
    now = 0.0

    @contextmanager
    def around(name: str) -> Iterator[None]:
        log.append(f"enter {name}")
        yield
        log.append(f"leave {name}")

    def step(name: str, takes: float) -> None:
        nonlocal now
        now += takes
        log.append(name)

    steps = {"slow": lambda: step("slow", 2.0), "fast": lambda: step("fast", 1.0)}
    seconds = timed_rounds(steps, 3, 1, lambda: log.append("together"), lambda: now, around, settling)
    assert seconds == {"slow": [2.0] * 3, "fast": [1.0] * 3}
    timed = ["enter slow", *["slow"] * settling, "together", "slow", "leave slow"]
    assert log[8 : 8 + len(timed)] == timed
    assert log.count("slow") == log.count("fast") == 1 + 3 * (1 + settling)
