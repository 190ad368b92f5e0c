"""``run_processes`` reports the end of every rank within the deadline, and no process outlives the call. Ranks are
forked here, except in one test: an interpreter for each rank takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from testkit.processes import RankFailedError, run_processes
from testkit.rank_processes import PRELOADED, RanksTimedOutError

GOES_ON, RETURNS, RAISES, IS_KILLED, IGNORES_SIGNALS = range(5)


def end_so(rank: int, size: int, ends: tuple[int, ...], folder: str) -> str:
    with open(os.path.join(folder, str(rank)), "w") as file:
        file.write(str(os.getpid()))
    if ends[rank] == RAISES:
        raise ValueError(f"of rank {rank}")
    if ends[rank] == IS_KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if ends[rank] == IGNORES_SIGNALS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if ends[rank] != RETURNS:
        time.sleep(60.0)
    return f"rank {rank} of {size}"


def run(ends: tuple[int, ...], folder: str, timeout: float = 120.0, start_method: str = "forkserver") -> list[str]:
    options: dict[str, Any] = {"timeout": timeout, "start_method": start_method}
    try:
        return run_processes(end_so, len(ends), (ends, folder), backend=None, patience=1.0, **options)
    finally:
        for rank in range(len(ends)):
            with open(os.path.join(folder, str(rank))) as file, pytest.raises(ProcessLookupError):
                os.kill(int(file.read()), 0)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "mixed"])
def test_results_come_in_the_order_of_ranks(tmp_path: object, start_method: str) -> None:
    given = run((RETURNS, RETURNS), str(tmp_path), start_method=start_method)
    assert given == ["rank 0 of 2", "rank 1 of 2"]


def is_preloaded(rank: int, size: int) -> bool:
    return all(name in sys.modules for name in PRELOADED)


def test_ranks_are_forked_from_a_process_that_has_imported_what_they_run() -> None:
    """This holds whatever other tests this process has. If a module set a different list when it is imported, each rank
    would spend a second on imports."""
    assert run_processes(is_preloaded, 3, backend=None, start_method="mixed") == [True] * 3


def hash_of_a_word(rank: int, size: int) -> int:
    return hash("word")


def test_the_mixed_start_method_gives_the_last_rank_another_order_of_sets() -> None:
    first, second, last = run_processes(hash_of_a_word, 3, backend=None, start_method="mixed")
    assert first == second != last


def test_a_rank_that_raises_ends_all_and_says_what_the_others_gave(tmp_path: object) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1: ValueError: of rank 1\n\nof rank 1:\nTraceback") as failed:
        run((RETURNS, RAISES, GOES_ON), str(tmp_path))
    assert failed.value.errors == {1: ("ValueError", "of rank 1")}
    assert failed.value.results in ({}, {0: "rank 0 of 3"})
    assert time.monotonic() - began < 60.0, "not at the deadline"


def test_a_rank_that_is_killed_is_named(tmp_path: object) -> None:
    with pytest.raises(RankFailedError, match="rank 0: ProcessDied: the process ended without a result"):
        run((IS_KILLED, GOES_ON), str(tmp_path))


def test_ranks_that_go_on_are_killed_at_the_deadline(tmp_path: object) -> None:
    with pytest.raises(RanksTimedOutError, match=r"rank\(s\) \[1, 2\] had not answered after 8 s"):
        run((RETURNS, GOES_ON, IGNORES_SIGNALS), str(tmp_path), timeout=8.0)
