"""The guard on ranks that are threads, with a store in memory and the real schedules: who raises what, and when."""

# ruff: noqa: PT012, SIM117 (what is raised comes from leaving the step, whatever its body does)

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import (
    CommunicatorClosedError,
    P2PTransferError,
    PipelineMismatchError,
    PipelinePeerError,
    PipelineStallError,
)
from megatron_pp.faults import failing
from megatron_pp.faults.attach import close_guard, guard_of, guarded, watched
from megatron_pp.faults.position.tracker import Outside
from megatron_pp.faults.store.failures import EXCEPTION, MISMATCH, STALL, Failure
from megatron_pp.faults.store.fault_store import FaultStore
from megatron_pp.faults.store.records import IN_STEP, Process, Progress
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import ToyData, toy_config
from testkit.faults.fault_injection import BACKWARD, DELAY, Fault, FaultyBlock, Trigger
from testkit.faults.fault_injection import EXCEPTION as RAISE
from testkit.thread_runs.step_runs import Rank, pipeline
from tests.unit_tests.faults.guards import Outcome, Unreachable, raised_by, wait_until_aborted

SIZE = 3
BAD = Failure(EXCEPTION, "p", 1, 1, "F0.0", "FORWARD", "ValueError", "bad")


def _train(
    fault: Fault | None,
    *,
    steps: int = 3,
    schedule: str = "1f1b",
    chunks: int = 1,
    microbatches: Callable[[int, int], int] = lambda rank, step: 2 * SIZE,
    absent: tuple[int, ...] = (),
    **fields: Any,
) -> dict[int, Outcome]:
    """Steps of the toy model on SIZE ranks; ``absent`` ranks never come."""

    def train(rank: Rank) -> Outcome:
        if rank.rank in absent:
            return None
        trigger = Trigger(fault if fault and fault.rank == rank.rank else None, lambda: None)
        try:
            for step in range(1, steps + 1):
                trigger.step, made = step, iter(range(chunks))
                model = rank.model(lambda stage, made=made: FaultyBlock(stage, next(made), trigger))
                rank.step(model, data=ToyData(microbatches(rank.rank, step)))
        except BaseException as error:
            return error
        return None

    fields = {"pipeline_schedule": schedule, "guarded": True, "timeout": 30.0, **fields}
    return dict(enumerate(pipeline(SIZE, chunks, 0, train, **fields)))


# -- one exception, every rank ---


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
@pytest.mark.parametrize("kind", [RAISE, BACKWARD])
def test_all_others_learn_of_an_exception(schedule: str, chunks: int, kind: str) -> None:
    fault = Fault(kind, rank=1, step=2, chunk=chunks - 1, mb=3)
    raised = _train(fault, schedule=schedule, chunks=chunks)
    assert type(raised[1]).__name__ == "InjectedError"
    for rank in (0, 2):
        error = raised[rank]
        assert isinstance(error, PipelinePeerError)
        assert (error.rank, error.instruction) == (1, fault.instruction)
        assert error.__cause__ is None, "the failed transfer is printed first"
        assert error.exception_type.endswith("InjectedError")
        assert error.message == fault.message
        assert "in _trigger" in error.traceback_tail or "fire" in error.traceback_tail
        assert f"pipeline rank 1 (global rank 1) raised {error.exception_type}" in str(error)
        assert f"chunk {fault.chunk}, microbatch 3" in str(error)


class Held:
    """What a step holds, such as a tensor."""


def test_nothing_of_a_step_is_kept_where_another_error_replaces_its_own() -> None:
    """No garbage is collected. Since Python 3.12 the frames of contexts that are generators lead to contextlib's."""
    network, kept = MemoryNetwork(2, store=dist.HashStore()), []

    def fail(rank: int, kind: type[Exception]) -> str:
        config = toy_config(p2p_timeout=20.0)
        communicator = P2PCommunicator(ThreadGroup(rank, 2), config, network.transport(rank))

        def step() -> None:
            held = Held()
            kept.append(weakref.ref(held))
            with guarded(communicator, guard_of(communicator, StepSettings.from_config(config)), Outside(), None, dict):
                raise kind("of this rank")

        try:
            step()
        except (PipelinePeerError, ValueError) as raised:
            return type(raised).__name__
        finally:
            close_guard(communicator)
        return "no error"

    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(fail, range(2), [P2PTransferError, ValueError]))
        assert found == ["PipelinePeerError", "ValueError"]
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_a_rank_that_is_done_learns_in_its_next_step() -> None:
    """The last stage finishes first; the fault comes in the last instruction of rank 0."""
    raised = _train(Fault(BACKWARD, rank=0, step=2, chunk=0, mb=2 * SIZE - 1))
    assert type(raised[0]).__name__ == "InjectedError"
    for rank in (1, 2):
        assert isinstance(raised[rank], PipelinePeerError)


def test_a_fault_after_a_rank_has_ended_does_not_disturb_it() -> None:
    raised = _train(Fault(BACKWARD, rank=0, step=3, chunk=0, mb=2 * SIZE - 1))
    assert type(raised[0]).__name__ == "InjectedError"
    assert raised[2] is None


def guards_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("megatron_pp ")}


def test_a_clean_run_raises_nothing_and_leaves_no_thread() -> None:
    before = guards_threads()
    assert set(_train(None).values()) == {None}
    assert guards_threads() <= before, "the guards are closed"


def test_a_communicator_that_is_dropped_leaves_no_thread() -> None:
    """Some programs make a communicator for each step."""
    before = guards_threads()
    config, network = toy_config(), MemoryNetwork(2, store=dist.HashStore())
    communicator = P2PCommunicator(ThreadGroup(0, 2), config, network.transport(0))
    with watched(communicator, config, "the step"):
        threads = guards_threads() - before
    del communicator
    gc.collect()
    for thread in threads:
        thread.join(10.0)
    assert [thread.is_alive() for thread in threads] == [False, False]


# -- entry ---


def test_ranks_that_disagree_from_the_start() -> None:
    raised = _train(None, microbatches=lambda rank, step: 4 if rank == 2 else 6)
    for error in raised.values():
        assert isinstance(error, PipelineMismatchError)
        assert error.field == "num_microbatches (M)"
        assert set(error.values.values()) == {"4", "6"}
        assert error.values[2] == "4"
        assert "rank 2 has 4" in str(error)


@pytest.mark.slow
def test_a_rank_that_never_enters_is_named() -> None:
    raised = _train(None, absent=(1,), p2p_timeout=1.5)
    for rank in (0, 2):
        error = raised[rank]
        assert isinstance(error, PipelineStallError)
        assert error.suspects == (1,)
        assert "rank 1 has not entered step 1" in str(error)


# -- stalls ---


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_own_code_is_named() -> None:
    fault = Fault(DELAY, rank=1, step=2, chunk=0, mb=3, seconds=4.0)
    raised = _train(fault, p2p_timeout=0.5, compute_timeout=1.5)
    for rank in range(SIZE):
        error = raised[rank]
        assert isinstance(error, PipelineStallError)
        assert error.suspects == (1,)
        assert "is in forward of chunk 0, microbatch 3 (F0.3" in error.progress[1]
        assert "held up by rank 1" in str(error)
    assert ">F0.3<" in str(raised[0])


@pytest.mark.slow
def test_an_operation_that_takes_several_times_p2p_timeout_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The rank that is in it gives signs of life; it says once where it is."""
    raised = _train(Fault(DELAY, 1, 2, 0, 3, seconds=4.0), p2p_timeout=1.5)
    assert set(raised.values()) == {None}
    place = "pipeline rank 1 has been in forward of chunk 0, microbatch 3 for"  # on a busy machine others say it too
    (said,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if place in text]
    assert "give up after 15 s" in said
    assert "in fire" in said  # the line of the user's code


def test_ranks_that_wait_for_each_other_are_given_up_after_p2p_timeout(guard_of: Any) -> None:
    """Nobody works, so that there is nothing to be patient with."""
    store = dist.HashStore()
    guards = [guard_of(rank, store, timeout=0.5) for rank in range(2)]

    def wait(rank: int) -> None:
        guard, source = guards[rank]
        guard.patience = 60.0
        program = source.plan.programs[rank]
        source.position = next(k for k, at in enumerate(program) if at.op in ("WAIT_F", "WAIT_B"))
        with guard.step(source):
            wait_until_aborted(source)

    for error in raised_by(2, wait):
        assert isinstance(error, PipelineStallError)
        assert "no rank has made progress for" in str(error)


@pytest.mark.parametrize(("grace", "timeout"), [(0.3, 30.0), (6.0, 0.5)], ids=["rank-gives-up", "watch-gives-up"])
def test_a_transfer_that_fails_for_no_known_reason(
    guard_of: Any, grace: float, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody died, nobody raised: after some seconds the error says which transfer it was, whoever is first to give
    up: the rank that looks for a reason or the watch, which sees that nobody moves."""
    monkeypatch.setattr(failing, "_GRACE", grace)
    guard, source = guard_of(0, dist.HashStore(), timeout=timeout)
    with (
        pytest.raises(PipelineStallError, match=r"a transfer of rank 0 failed .*the cable") as caught,
        guard.step(source),
    ):
        raise P2PTransferError("the cable")
    assert isinstance(caught.value.__cause__, P2PTransferError)


# -- the guard itself ---


def test_another_pipelines_failure_ends_this_one_too(guard_of: Any) -> None:
    """Tensor- and data-parallel partners of a failed pipeline would wait for it in vain."""
    store = dist.HashStore()
    guard, source = guard_of(0, store)
    other, other_source = guard_of(1, store, pipeline="q")
    with pytest.raises(ZeroDivisionError), other.step(other_source):
        raise ZeroDivisionError("elsewhere")
    with pytest.raises(PipelinePeerError, match=r"rank 1 \(global rank 11\) of pipeline q raised ZeroDivisionError"):
        with guard.step(source):
            wait_until_aborted(source)


def test_a_rank_that_notices_nothing_gets_the_error_when_it_leaves(guard_of: Any) -> None:
    """On NCCL an abort lets kernels end without an error on the host."""
    store = dist.HashStore()
    guard, source = guard_of(0, store)
    FaultStore(store, "p", 1, 2, 1).publish_failure(BAD)
    with pytest.raises(PipelinePeerError, match="ValueError"), guard.step(source):
        assert source.aborted.wait(10.0)


def test_the_first_exception_counts_more_than_the_stall_that_follows_it() -> None:
    store = dist.HashStore()
    records = FaultStore(store, "p", 0, 2, 0)
    records.publish_failure(Failure(STALL, "p", 0, 0, message="a transfer failed"))
    records.publish_failure(Failure(EXCEPTION, "p", 1, 1, "F0.0", "FORWARD", "ValueError", "first"))
    records.publish_failure(Failure(EXCEPTION, "p", 0, 0, "F0.1", "FORWARD", "ValueError", "second"))
    found = records.read_failure()
    assert found is not None
    assert found.message == "first"


class _LooksTooEarly:
    """A store whose reader always polls just before the others publish a failure, until it publishes one itself."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._has_published = False

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        return self._store.compare_set(key, expected, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        self._has_published |= key.endswith("/failed")
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        early = keys[0].endswith("/failed") and not self._has_published
        return not early and bool(self._store.check(keys))


@pytest.mark.parametrize(
    ("kind", "error"), [(EXCEPTION, PipelinePeerError), (MISMATCH, PipelineMismatchError), (STALL, PipelineStallError)]
)
def test_the_end_of_a_process_does_not_overtake_what_it_has_published(
    guard_of: Any, gone: Process, kind: str, error: type[Exception]
) -> None:
    """A rank that raises publishes it and ends; the others may see its end first, as a look at the store is always some
    time ago."""
    store = dist.HashStore()
    guard, source = guard_of(0, _LooksTooEarly(store))
    other = FaultStore(store, "p", 1, 2, 1)
    other.publish(Progress(1, IN_STEP, 3, "F0.1", process=gone))
    other.publish_failure(Failure(kind, "p", 1, 1, message="published before it ended"))
    with pytest.raises(error, match="published before it ended"), guard.step(source):
        raise P2PTransferError("connection closed by peer")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_after_a_failure_the_guard_is_closed(guard_of: Any, kind: type[BaseException]) -> None:
    """An interrupt is an exception like any other."""
    store = dist.HashStore()
    one, source = guard_of(0, store)
    two, other_source = guard_of(1, store)
    with pytest.raises(kind), one.step(source):
        raise kind("first")
    with pytest.raises(CommunicatorClosedError, match="cannot be used any more"), one.step(source):
        pass
    with pytest.raises(PipelinePeerError, match=kind.__name__), two.step(other_source):
        wait_until_aborted(other_source)


def test_failures_published_before_a_guard_was_made_are_ignored(guard_of: Any) -> None:
    store = dist.HashStore()
    old, source = guard_of(0, store)
    with pytest.raises(ValueError, match="old"), old.step(source):
        raise ValueError("old")
    new, source = guard_of(0, store)
    with new.step(source):
        time.sleep(0.6)  # long enough to look


@pytest.mark.slow
def test_a_rank_that_does_not_leave_its_step_is_escalated(guard_of: Any) -> None:
    """Blocked in a collective of another group, where aborting the communicator does not help."""
    stronger = threading.Event()
    store = dist.HashStore()
    guard, source = guard_of(0, store, abort=lambda: None, escalate=stronger.set)
    FaultStore(store, "p", 1, 2, 1).publish_failure(BAD)
    with pytest.raises(PipelinePeerError), guard.step(source):
        assert stronger.wait(10.0)
        torch._assert_async(torch.tensor(False), "Application timeout caused pair closure")  # in C++


def test_a_step_without_failures_makes_no_store_calls_from_the_main_thread(guard_of: Any) -> None:
    """Entering and leaving a step only assigns; only the heartbeat thread calls the store."""
    calls: list[str] = []
    main = threading.get_ident()

    class Counting(Unreachable):
        def __getattr__(self, name: str) -> Any:
            call = super().__getattr__(name)

            def counted(*args: Any) -> Any:
                if threading.get_ident() == main:
                    calls.append(name)
                return call(*args)

            return counted

    guard, source = guard_of(0, Counting())
    calls.clear()
    for _ in range(100):
        with guard.step(source, key=None):
            pass
    assert calls == []


# -- around steps ---


def test_a_failure_reaches_ranks_between_steps_that_are_watched(guard_of: Any) -> None:
    """Rank 0 is through with its step and waits in a collective of the optimizer; rank 1 fails in its step."""
    store = dist.HashStore()
    one, source = guard_of(0, store)
    two, other_source = guard_of(1, store)
    with pytest.raises(PipelinePeerError, match="ValueError"):
        with one.watch("the training step"):
            with one.step(source):
                pass
            with pytest.raises(ValueError, match="late"), two.step(other_source):
                raise ValueError("late")
            wait_until_aborted(source)


def test_an_error_that_passes_two_guards_is_reported_once(guard_of: Any) -> None:
    store = dist.HashStore()
    guard, source = guard_of(0, store)
    with pytest.raises(ValueError, match="inner"), guard.watch("the training step"), guard.step(source):
        raise ValueError("inner")
    records = FaultStore(store, "p", 1, 2, 1)
    assert store.add(f"megatron_pp/{records.epoch}/tickets", 0) == 1
    found = records.read_failure()
    assert found is not None
    assert (found.message, found.instruction) == ("inner", str(source.plan.programs[0][0]))


def test_the_error_names_the_watched_phase(guard_of: Any) -> None:
    store = dist.HashStore()
    one, _ = guard_of(0, store)
    two, other_source = guard_of(1, store)
    with pytest.raises(OSError, match="disk"), one.watch("the optimizer step"):
        raise OSError("disk")
    with pytest.raises(PipelinePeerError, match="raised OSError in the optimizer step: disk"), two.step(other_source):
        wait_until_aborted(other_source)
