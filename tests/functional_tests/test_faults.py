"""Faults in real processes on gloo: every rank soon gets the right error, and can go on with new process groups.

Each test runs several episodes on one pool of processes, since starting processes takes most of the time. After each
episode nothing may be left: these tests check that threads, files and tensors do not grow; scripts/soak.py checks
memory and thousands of steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from testkit.faults.fault_injection import BACKWARD, DATA, DELAY, EXCEPTION, HOLD, KILL, MEMORY, SHAPE, STOP, Fault
from testkit.faults.fault_scenario_checks import complaints, leaks
from testkit.faults.fault_scenarios import Episode, Pool, Report, Resources

SIZE = 3
GROUP_TIMEOUT = 20.0
OVERLAP = {"overlap_p2p_comm": True}


class Lab:
    """A pool of processes, which numbers its episodes."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._numbers = itertools.count(1)
        self._first: dict[int, Resources] = {}

    def assert_episode(self, schedule: str, chunks: int, fault: Fault | None, **fields: object) -> dict[int, Report]:
        """Run an episode of four steps, and assert its outcome and that nothing is left."""
        reports = self.assert_outcome(schedule, chunks, fault, **fields)
        assert self._leaks(held_after(reports)) == {}
        return reports

    def assert_outcome(self, schedule: str, chunks: int, fault: Fault | None, **fields: object) -> dict[int, Report]:
        """Run an episode of four steps and assert its outcome, but not what it leaves behind."""
        fields = {"microbatches": 2 * SIZE, **fields}
        episode = Episode(next(self._numbers), schedule, chunks, steps=4, fault=fault, **fields)  # type: ignore[arg-type]
        reports = self.pool.run(episode)
        assert complaints(episode, reports, SIZE, slack=20.0) == []
        return reports

    def assert_clean_within(self, seconds: float, reports: dict[int, Report]) -> None:
        """Assert that all that an episode has left behind is gone within ``seconds``."""
        held = self.pool.await_resources(held_after(reports), lambda now: not self._leaks(now), seconds)
        assert self._leaks(held) == {}

    def _leaks(self, held: dict[int, Resources]) -> dict[int, list[str]]:
        pids = self.pool.pids()
        found = {rank: leaks(self._first.setdefault(pids[rank], now), now) for rank, now in held.items()}
        return {rank: lines for rank, lines in found.items() if lines}


def held_after(reports: dict[int, Report]) -> dict[int, Resources]:
    return {rank: report.resources for rank, report in reports.items() if report.resources is not None}


@pytest.fixture(scope="module")
def lab_amid_large_messages() -> Iterator[tuple[Lab, dict[int, Report]]]:
    """Yield a lab with its own processes, since its leftovers stay for a while, and the reports of its episode.

    In the episode messages of 16 MB are on their way to a rank that is stopped and then killed.
    """
    fault = Fault(KILL, rank=1, step=2, chunk=0, mb=2, seconds=1.0)
    big = {"seq_length": 500_000, "microbatches": 4, "group_timeout": GROUP_TIMEOUT, "p2p_timeout": 60.0}
    with Pool(SIZE, start_method="forkserver") as pool:
        lab = Lab(pool)
        lab.assert_episode("1f1b", 1, None, fields=OVERLAP)
        yield lab, lab.assert_outcome("1f1b", 1, fault, fields=OVERLAP, **big)


def test_a_rank_killed_amid_large_messages_is_named(
    lab_amid_large_messages: tuple[Lab, dict[int, Report]],
) -> None:
    """The first test of this file: the last one sees what is left after the others' time."""
    reports = lab_amid_large_messages[1]
    for rank in (0, 2):
        error = reports[rank].error
        assert error is not None
        assert (error[0], error[2]["suspects"]) == ("PipelineStallError", (1,))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Pool(SIZE, start_method="forkserver") as pool:
        lab = Lab(pool)
        for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)):
            lab.assert_episode(schedule, chunks, None, fields=OVERLAP)  # the rank sends nothing and raises nothing
        yield lab


@pytest.mark.parametrize("kind", [EXCEPTION, DATA, BACKWARD, MEMORY])
def test_one_exception_reaches_every_rank(lab: Lab, kind: str) -> None:
    lab.assert_episode("1f1b", 1, Fault(kind, rank=1, step=2, chunk=0, mb=3), fields=OVERLAP)
    lab.assert_episode("interleaved_1f1b", 2, Fault(kind, rank=2, step=2, chunk=1, mb=4), fields=OVERLAP)
    lab.assert_episode("zb_v", 2, Fault(kind, rank=0, step=2, chunk=1, mb=5))


def test_an_exception_in_the_first_step_and_the_first_instruction(lab: Lab) -> None:
    lab.assert_episode("1f1b", 1, Fault(EXCEPTION, rank=0, step=1, chunk=0, mb=0))


def test_a_wrong_shape_is_an_error_where_it_arises(lab: Lab) -> None:
    lab.assert_episode("1f1b", 1, Fault(SHAPE, rank=0, step=2, chunk=0, mb=3), fields={"batch_p2p_comm": True})
    lab.assert_episode("interleaved_1f1b", 2, Fault(SHAPE, rank=1, step=2, chunk=1, mb=1), fields=OVERLAP)


def test_a_killed_rank_is_named(lab: Lab) -> None:
    lab.assert_episode("1f1b", 1, Fault(KILL, rank=1, step=2, chunk=0, mb=3), p2p_timeout=60.0, fields=OVERLAP)


@pytest.mark.parametrize("kind", [EXCEPTION, STOP])
def test_faults_amid_messages_with_connections_of_their_own(lab: Lab, kind: str) -> None:
    """Here messages have 640 KB. From 256 KiB on a thread posts the sends of a channel, and threads do all waits."""
    fault = Fault(kind, rank=2, step=2, chunk=1, mb=1)
    lab.assert_episode("interleaved_1f1b", 2, fault, p2p_timeout=3.0, seq_length=20_000, fields=OVERLAP)


def test_a_stopped_rank_is_named_and_ends_once_it_continues(lab: Lab) -> None:
    reports = lab.assert_episode("interleaved_1f1b", 2, Fault(STOP, rank=1, step=2, chunk=0, mb=3), p2p_timeout=3.0)
    for rank in (0, 2):
        error = reports[rank].error
        assert error is not None
        assert "is stopped, as by SIGSTOP" in error[1]


def test_a_stopped_rank_is_found_long_before_the_timeout_but_a_rank_that_holds_the_gil_is_no_error(
    lab: Lab,
) -> None:
    """Neither rank sends heartbeats. By default a stopped rank is found after an eighth of p2p_timeout: 7.5 s here."""
    fault = Fault(STOP, rank=1, step=2, chunk=0, mb=3)
    reports = lab.assert_episode("1f1b", 1, fault, p2p_timeout=60.0, stopped_seconds=1.0, fields=OVERLAP)
    assert all("is stopped, as by SIGSTOP" in (reports[rank].error or ("", ""))[1] for rank in (0, 2))
    held = fault._replace(kind=HOLD, seconds=12.0)
    lab.assert_episode("1f1b", 1, held, p2p_timeout=60.0, stopped_seconds=1.0, fields=OVERLAP)


def test_a_slow_rank_is_no_error(lab: Lab) -> None:
    """One operation takes twice p2p_timeout; the numbers are right."""
    fault = Fault(DELAY, rank=1, step=2, chunk=0, mb=3, seconds=5.0)
    lab.assert_episode("1f1b", 1, fault, p2p_timeout=2.5, fields=OVERLAP)


def test_threads_left_in_large_messages_end_after_the_groups_timeout(
    lab_amid_large_messages: tuple[Lab, dict[int, Report]],
) -> None:
    """gloo does not end a half-sent message before its group's timeout."""
    lab, reports = lab_amid_large_messages
    lab.assert_clean_within(GROUP_TIMEOUT + 5.0, reports)
