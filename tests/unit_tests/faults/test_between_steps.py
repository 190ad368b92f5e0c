"""What the guard watches after a step where the training loop is known, as Megatron's: peers that die, records."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.errors import CommunicatorClosedError, PipelinePeerError, PipelineStallError
from megatron_pp.faults import attach
from megatron_pp.faults.attach import close_guard
from megatron_pp.faults.between_steps import ended_by
from megatron_pp.faults.store.failures import EXCEPTION, Failure
from megatron_pp.faults.store.fault_store import FaultStore
from megatron_pp.faults.store.processes import this_process
from megatron_pp.faults.store.records import AFTER, DONE, Process, Progress
from megatron_pp.integrations.megatron.steps.after_step import WatchedEnd
from megatron_pp.integrations.megatron.steps.call import MegatronHost
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.runtime.communicators import KEPT, communicator_for
from megatron_pp.runtime.host import Host
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import toy_config
from testkit.thread_runs.step_runs import Rank, pipeline
from tests.unit_tests.faults.guards import new_guard

WORK = "the optimizer"
SECONDS = 10.0


class First:
    """A guard of rank 0 of two, which has run a step and is after it; rank 1 is a record in the store."""

    def __init__(self, timeout: float = 600.0) -> None:
        self.escalated, self.is_gone, self.store = threading.Event(), False, dist.HashStore()
        more = {"escalate": self.escalated.set, "is_gone": lambda: self.is_gone}
        self.guard, self.source = new_guard(0, self.store, timeout=timeout, **more)
        self.aborted = self.source.aborted
        self.other = FaultStore(self.store, "p", 1, 2, 1)
        self.step()
        while not self.guard.heartbeat.peers.connected:
            time.sleep(0.01)

    def step(self) -> None:
        with self.guard.step(self.source, after=WORK):
            pass

    def other_is(self, state: str, process: Process) -> None:
        self.other.publish(Progress(1, state, process=process, beat=time.monotonic_ns()))

    def seen(self) -> Progress | None:
        """What others see of rank 0."""
        return self.other.read_all(Progress).get(0)


@pytest.mark.slow
def test_a_rank_that_dies_after_its_step_is_found_in_seconds(gone: Process, caplog: pytest.LogCaptureFixture) -> None:
    """The groups that the program may be blocked in are aborted, the log says who it was, and the next step raises."""
    rank = First()
    rank.other_is(AFTER, gone)
    assert rank.aborted.wait(SECONDS)
    assert rank.escalated.wait(SECONDS)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR][:1]
    assert f"pipeline rank 0, {WORK}: pipeline stalled: the process of rank 1" in said
    with pytest.raises(PipelineStallError, match="the process of rank 1") as caught:
        rank.step()
    assert caught.value.suspects == (1,)
    assert WORK in caught.value.progress[0]
    with pytest.raises(CommunicatorClosedError):
        rank.step()
    rank.guard.close()


@pytest.mark.slow
def test_a_failure_elsewhere_is_found_after_the_step() -> None:
    rank = First()
    rank.other.publish_failure(Failure(EXCEPTION, "p", 1, 1, "F0.0", "FORWARD", "ValueError", "bad"))
    assert rank.escalated.wait(SECONDS)
    with pytest.raises(PipelinePeerError, match="ValueError"):
        rank.step()
    rank.guard.close()


def test_a_step_that_raises_the_failure_does_not_log_it_too(caplog: pytest.LogCaptureFixture) -> None:
    """The abort makes the step fail at once: it is over before the watchdog goes on."""
    rank = First()
    aborted, over, acted = threading.Event(), threading.Event(), threading.Event()

    def abort() -> None:
        aborted.set()
        assert over.wait(SECONDS)
        acted.set()

    rank.guard.abort = abort
    rank.other.publish_failure(Failure(EXCEPTION, "p", 1, 1, "F0.0", "FORWARD", "ValueError", "bad"))
    with pytest.raises(PipelinePeerError, match="ValueError"), rank.guard.step(rank.source, after=WORK):
        assert aborted.wait(SECONDS)
    over.set()
    assert acted.wait(SECONDS)
    rank.guard.close()
    assert not [record for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.slow
def test_a_rank_that_has_ended_in_order_is_not_accused(gone: Process) -> None:
    """The process is gone before the next read shows that the rank was done."""
    rank = First()
    rank.other_is(AFTER, this_process())
    time.sleep(1.5)
    peers = rank.guard.heartbeat.peers
    with rank.guard.heartbeat.lock:
        rank.other_is(DONE, gone)
        seen = peers.seen[1]
        peers.seen[1].progress = Progress(1, AFTER, process=gone, beat=seen.progress.beat)
        assert not rank.guard._act()  # the watchdog is first
    assert not rank.aborted.wait(1.5)
    rank.step()
    rank.guard.close()


@pytest.mark.slow
def test_code_after_a_step_may_take_any_time() -> None:
    """The ranks send heartbeats."""
    rank = First(timeout=1.0)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        rank.other_is(AFTER, this_process())
        assert not rank.aborted.wait(0.2)
    seen = rank.seen()
    assert seen is not None
    assert (seen.state, seen.text) == (AFTER, WORK)
    rank.step()
    rank.guard.close()


@pytest.mark.slow
def test_the_watch_ends_with_the_guard_and_with_its_group(gone: Process) -> None:
    closed, exiting, destroyed = First(), First(), First()
    time.sleep(1.0)
    closed.guard.close()
    exiting.guard.heartbeat.close()
    destroyed.is_gone = True
    for rank in (closed, exiting, destroyed):
        until = time.monotonic() + SECONDS
        while ((seen := rank.seen()) is None or seen.state != DONE) and time.monotonic() < until:
            time.sleep(0.05)
        assert seen is not None
        assert seen.state == DONE
        rank.other_is(AFTER, gone)
    assert not destroyed.aborted.wait(2.0)
    destroyed.guard.close()


def test_the_watch_ends_with_the_store() -> None:
    """The store's process may have ended in order, after training."""
    rank = First()

    def publish(record: Any) -> None:
        raise dist.DistNetworkError("connection reset")

    until = time.monotonic() + SECONDS
    while not rank.guard.heartbeat.peers.connected and time.monotonic() < until:
        time.sleep(0.01)
    rank.guard.heartbeat.store.publish = publish  # type: ignore[method-assign]
    while rank.guard.tracker.where() is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert rank.guard.tracker.where() is None
    assert not rank.aborted.is_set()
    rank.guard.close()


@pytest.mark.slow
def test_a_failure_found_between_steps_is_raised_when_the_communicator_is_requested(gone: Process) -> None:
    """The communicator's group is aborted by then."""
    rank, group, config = First(), ThreadGroup(0, 2), toy_config()
    transport = MemoryNetwork(2).transport(0)
    transport.guard = rank.guard
    KEPT[group] = {("any",): P2PCommunicator(group, config, transport)}
    rank.other_is(AFTER, gone)
    assert rank.aborted.wait(SECONDS)
    transport.aborted = True
    with pytest.raises(PipelineStallError, match="the process of rank 1"):
        communicator_for(group, config)
    with pytest.raises(CommunicatorClosedError):
        communicator_for(group, config)
    rank.guard.close()


def test_an_exception_between_steps_is_published_and_stays_what_it_was() -> None:
    rank = First()
    error = ValueError("bad")
    assert ended_by(rank.guard, error) is error
    known = rank.other.read_failure()
    assert known is not None
    assert (known.kind, known.where, known.exception_type, known.message) == (EXCEPTION, WORK, "ValueError", "bad")
    assert rank.aborted.is_set()
    with pytest.raises(CommunicatorClosedError):
        rank.step()
    assert ended_by(rank.guard, error) is error, "once"
    rank.guard.close()


def of_gloo() -> BaseException:
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    with pytest.raises(RuntimeError) as caught:
        torch._assert_async(torch.tensor(False), text)
    return caught.value


def test_an_error_of_a_collective_between_steps_is_replaced_by_its_cause() -> None:
    rank = First()
    rank.other.publish_failure(Failure(EXCEPTION, "p", 1, 1, "", WORK, "ValueError", "bad"))
    found = ended_by(rank.guard, of_gloo())
    assert isinstance(found, PipelinePeerError)
    assert f"ValueError in {WORK}: bad" in str(found)
    rank.guard.close()


@pytest.mark.slow
def test_a_program_that_ended_is_named_where_a_collective_fails_for_no_other_reason(gone: Process) -> None:
    rank = First(timeout=30.0)
    rank.other_is(DONE, gone)
    found = ended_by(rank.guard, of_gloo())
    assert isinstance(found, PipelineStallError)
    assert found.suspects == (1,)
    assert f"the program of rank 1 (pid {gone.pid}) has ended after step 1" in str(found)
    rank.guard.close()


@pytest.mark.slow
def test_a_rank_without_a_heartbeat_is_found_between_steps_too() -> None:
    """A stopped process is such a rank. How long its work takes does not count."""
    rank = First(timeout=2.0)
    rank.other_is(AFTER, this_process())
    assert rank.aborted.wait(SECONDS)
    with pytest.raises(PipelineStallError, match="no heartbeat from rank 1"):
        rank.step()
    rank.guard.close()


def test_a_program_that_dies_of_a_collective_prints_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    rank = First()
    rank.other.publish_failure(Failure(EXCEPTION, "p", 1, 1, "", WORK, "ValueError", "bad"))
    attach.GUARDS[rank.guard] = None
    error = of_gloo()
    WatchedEnd(sys.__excepthook__)(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert "PipelinePeerError: pipeline rank 1 (global rank 1) raised ValueError" in shown
    assert "Connection closed by peer" in shown, "and what was raised here"
    rank.guard.close()


def test_steps_of_a_plug_in_are_followed_by_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's name what follows; others' end with the step."""
    assert MegatronHost.followed_by
    assert not Host.followed_by
    both = threading.Barrier(2)

    def states(rank: Rank) -> list[str]:
        found, model = [], rank.model()
        for _ in range(2):
            rank.step(model)
            here = rank.communicator.transport.guard.tracker.observe()
            found.append("" if here is None else f"{here.state}: {here.text}")
            if both.wait(20.0) == 0:
                monkeypatch.setattr(Host, "followed_by", WORK)
            both.wait(20.0)
        close_guard(rank.communicator)
        return found

    assert pipeline(2, 1, 4, states, guarded=True) == [["", f"{AFTER}: {WORK}"]] * 2
