"""Ranks that are in different numbers of pipelines in one job: each pipeline's members find each other, whatever else
they have been in, and failures reach whom they concern."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pp.errors import PipelineMismatchError, PipelinePeerError
from megatron_pp.faults.store.failures import EXCEPTION, Failure
from megatron_pp.faults.store.fault_store import FaultStore
from megatron_pp.faults.store.processes import this_process
from megatron_pp.faults.store.records import Process
from tests.unit_tests.faults.guards import new_guard, raised_by, wait_until_aborted

TIMEOUT = 4.0


class Member:
    """Global rank ``me`` of the pipeline of ``ranks``; ``group`` is the name of one of several over the same ranks, in
    the order of the alphabet."""

    def __init__(self, store: Any, ranks: tuple[int, ...], me: int, group: str = "", **more: Any) -> None:
        name, more = "-".join(map(str, ranks)) + group, {"global_rank": me, "members": ranks, **more}
        self.guard, self.source = new_guard(ranks.index(me), store, name, TIMEOUT, len(ranks), **more)
        heartbeat = self.guard.heartbeat  # connects here, and not in its thread: the order is the test's
        heartbeat.store, heartbeat.peers.connected = heartbeat._connect(), True

    def step(self, body: Callable[[], object] = lambda: None, schedule: str = "1f1b") -> None:
        with self.guard.step(self.source, "a plan", lambda: {"schedule": schedule}):
            body()

    def close(self) -> None:
        self.guard.close()


def _together(*calls: Callable[[], None]) -> list[BaseException | None]:
    """Each in a thread; what each raised."""
    return raised_by(len(calls), lambda place: calls[place](), 20.0)


def _step(store: Any, ranks: tuple[int, ...]) -> list[BaseException | None]:
    members = [Member(store, ranks, me) for me in ranks]
    raised = _together(*(member.step for member in members))
    for member in members:
        member.close()
    return raised


def test_a_rank_that_has_been_in_another_pipeline_is_found() -> None:
    """Rank 0 is in a pipeline with rank 1, then in one with rank 2, then in one with both; rank 2 was not in the
    first."""
    store = dist.HashStore()
    assert _step(store, (0, 1)) == [None, None]
    assert _step(store, (0, 2)) == [None, None]
    assert _step(store, (0, 1, 2)) == [None, None, None]


def test_a_pipeline_that_is_made_again_is_found_again() -> None:
    store = dist.HashStore()
    for _ in range(3):
        assert _step(store, (0, 1)) == [None, None]
    assert _step(store, (1, 2)) == [None, None]


def test_a_failure_of_one_pipeline_does_not_end_the_next_pipeline_of_its_ranks() -> None:
    store = dist.HashStore()
    one = Member(store, (0, 1), 0)
    with pytest.raises(ValueError, match="dealt with"):
        _raise_in(one, ValueError("dealt with"))
    one.close()
    assert _step(store, (0, 2)) == [None, None]


def _raise_in(member: Member, error: Exception) -> None:
    """Without the others: the entry is not checked."""
    with member.guard.step(member.source):
        raise error


@pytest.mark.parametrize("uptime", [-1e6, 1e6], ids=["booted later", "booted earlier"])
def test_clocks_of_different_machines_are_not_compared(uptime: float) -> None:
    """Rank 0 fails on one machine, and a job that is started anew, with the same store, has it on another."""
    store, elsewhere = dist.HashStore(), Process("another machine", 1, 1)
    at = time.monotonic()
    old = FaultStore(store, "0-1", 0, 2, 0, (0, 1), at, elsewhere)
    old.publish_failure(Failure(EXCEPTION, "0-1", 0, 0, at=at + uptime, process=elsewhere))
    new = [FaultStore(store, "0-2", rank, 2, me, (0, 2), at, this_process()) for rank, me in enumerate((0, 2))]
    assert [one.read_failure() for one in new] == [None, None]
    old.publish_failure(late := Failure(EXCEPTION, "0-1", 0, 0, at=at + uptime, process=elsewhere))
    assert [one.read_failure() for one in new] == [late, late]


def test_a_failure_reaches_a_pipeline_that_is_made_only_later() -> None:
    """Ranks 0 and 1 fail in their first step, before their data-parallel partners 2 and 3 have come to theirs."""
    store = dist.HashStore()
    early = Member(store, (0, 1), 0)
    with pytest.raises(ValueError, match="first step"):
        _raise_in(early, ValueError("first step"))
    late = Member(store, (2, 3), 2)
    with pytest.raises(PipelinePeerError, match=r"global rank 0\) of pipeline 0-1 raised ValueError"):
        late.step(lambda: None)
    for member in (early, late):
        member.close()


def test_ranks_of_another_pipeline_learn_which_ranks_disagree() -> None:
    """Both pipelines have a rank 0 and a rank 1."""
    store = dist.HashStore()
    members = [Member(store, ranks, me, world_size=4) for ranks in ((0, 2), (1, 3)) for me in ranks]
    ended = threading.Event()

    def enter(schedule: str, member: Member) -> None:
        try:
            member.step(schedule=schedule)
        finally:
            ended.set()

    def wait(member: Member) -> None:
        member.step(lambda: ended.wait(10.0) and wait_until_aborted(member.source))

    schedules = ("1f1b", "gpipe")
    disagree = [partial(enter, *one) for one in zip(schedules, members[:2], strict=True)]
    raised = _together(*disagree, *(partial(wait, member) for member in members[2:]))
    said = "do not agree on schedule: rank 0 has 1f1b, rank 1 has gpipe (global rank 0, 2)"
    for error, is_elsewhere in zip(raised, (False, False, True, True), strict=True):
        assert isinstance(error, PipelineMismatchError)
        assert said in str(error)
        assert (" of pipeline 0-2; " in str(error)) == is_elsewhere
        assert error.values == dict(enumerate(schedules))
    for member in members:
        member.close()


def test_a_failure_while_others_wait_in_the_next_pipeline_reaches_them() -> None:
    """Rank 2 waits for rank 0, which fails in the pipeline that it is still in."""
    store = dist.HashStore()
    waiting, failing = Member(store, (0, 2), 2), Member(store, (0, 1), 0)
    begun = threading.Event()

    def fail() -> None:
        begun.wait(5.0)
        _raise_in(failing, ValueError("on the way"))

    def wait() -> None:
        begun.set()
        waiting.step()

    raised = _together(wait, fail)
    assert isinstance(raised[0], PipelinePeerError)
    assert "of pipeline 0-1 raised ValueError" in str(raised[0])
    for member in (waiting, failing):
        member.close()


def test_a_failure_before_a_late_member_has_connected_reaches_it() -> None:
    """Rank 0 is in two pipelines, in a thread each, and fails in one before rank 2 has a connection for the other."""
    store = dist.HashStore()
    there, failing = Member(store, (0, 2), 0), Member(store, (0, 1), 0)
    with pytest.raises(ValueError, match="early"):
        _raise_in(failing, ValueError("early"))
    late = Member(store, (0, 2), 2)
    with pytest.raises(PipelinePeerError, match="of pipeline 0-1 raised ValueError"):
        late.step()
    for member in (there, failing, late):
        member.close()


def test_two_pipelines_over_the_same_ranks_that_are_made_in_different_orders() -> None:
    """Threads make them so. A failure in one pipeline reaches its other rank, and does not reach the other pipeline."""
    store = dist.HashStore()
    made = {me: {name: Member(store, (0, 1), me, name) for name in order} for me, order in ((0, "ab"), (1, "ba"))}
    steps = (made[1]["a"].step, made[0]["b"].step, made[1]["b"].step)
    raised = _together(lambda: _raise_in(made[0]["a"], ValueError("in a")), *steps)
    assert isinstance(raised[0], ValueError)
    assert isinstance(raised[1], PipelinePeerError)
    assert raised[2:] == [None, None]
    for member in (*made[0].values(), *made[1].values()):
        member.close()
