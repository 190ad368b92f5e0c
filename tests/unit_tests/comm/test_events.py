"""Events are used again, and not before nothing asks or waits for them any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_pp.comm import collectives, events
from megatron_pp.faults.position.device_events import CompletedWork
from megatron_pp.faults.position.tracker import Place
from megatron_pp.features.offload import host_copies
from megatron_pp.features.pairs.pair_runner import on_two_streams
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.toy import ToyData
from testkit.device_runs.stream_runs import POLICIES, on_one_device, plan_on_streams, toy_step_on_streams
from testkit.streams import StreamReport
from testkit.streams.device import current_device
from testkit.streams.torch_calls import cuda as virtual
from tests.unit_tests.faults.position.test_hosts_that_run_ahead import Kernel


class GivesBackWhenRecorded(events.EventPool):
    """An event is used again while what it was recorded for is still to be waited for."""

    def record(self, stream: Any = None) -> Any:
        event = super().record(stream)
        self._free.append(event)
        return event

    def give_back(self, event: Any) -> None:
        """Do nothing: the event is free already."""


def offloaded() -> StreamReport:
    return plan_on_streams(PlanSpec("interleaved_1f1b", 2, 2, 6, offload_chunks=2))


def paired() -> StreamReport:
    more = {"overlapped_forward_backward": on_two_streams, **POLICIES["overlap"]}
    return toy_step_on_streams("dualpipe_v", 2, ToyData(8), **more)[0]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events that are made."""
    found: list[Any] = []
    init = virtual.Event.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(virtual.Event, "__init__", noted)
    return found


@pytest.mark.parametrize(("run", "most"), [(offloaded, 16), (paired, 4)])
def test_a_step_makes_few_events(run: Callable[[], StreamReport], most: int, made: list[Any]) -> None:
    report = run()
    assert not report.races, str(report)
    assert len(made) <= most


def test_reusing_an_event_too_early_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "EventPool", GivesBackWhenRecorded)
    assert offloaded().races


def follow(completed: CompletedWork) -> list[tuple[int, int | None]]:
    """Marks steps, three of them ahead of what is found over; after each, its number and the oldest step not over."""
    side, at = torch.cuda.Stream(), []
    for step in range(100):
        with torch.cuda.stream(side):
            torch.ones(8)
            completed.mark(Place(step, None, 0, "the step"))
        if step % 4 == 3:
            completed.poll()
        oldest = completed.oldest
        at.append((step, None if oldest is None else oldest.step))
    return at


def test_marks_of_completed_work_reuse_events(made: list[Any]) -> None:
    expected = [(step, None if step % 4 == 3 else step - step % 4) for step in range(100)]
    assert on_one_device(lambda: follow(CompletedWork())).results == [expected]
    assert len(made) == 4


@pytest.mark.parametrize("pool", [events.EventPool, GivesBackWhenRecorded])
def test_reusing_a_marks_event_too_early_hides_completed_work(pool: type[events.EventPool]) -> None:
    """The second mark stands behind a kernel that does not end."""

    def program() -> int:
        completed, device = CompletedWork(), current_device()
        assert device is not None
        completed.events = pool()
        completed.mark(Place(1, None, 0, "the step"))
        device.stream.wait_for({}, [Kernel()])
        completed.mark(Place(2, None, 0, "the step"))
        completed.poll()
        assert completed.oldest is not None
        return completed.oldest.step

    assert on_one_device(program).results == [2 if pool is events.EventPool else 1]


def test_marks_keep_events_that_may_still_be_queried(made: list[Any]) -> None:
    def program() -> list[Any]:
        completed = CompletedWork()
        completed.mark(Place(1, None, 0, "the step"))
        completed.clear()
        completed.mark(Place(2, None, 0, "the step"))
        return list(completed.events._free)

    assert on_one_device(program).results == [[]]
    assert len(made) == 2


def test_collectives_on_a_stream_reuse_events(made: list[Any]) -> None:
    def program() -> list[bool]:
        group: Any = None
        pool, stream = collectives.GroupCollectives(group, lambda: None), torch.cuda.Stream()  # type: ignore[arg-type]
        over = []
        for _ in range(10):
            work = collectives.OnStream(lambda on: None, pool, stream)
            over += [work.is_completed(), work.wait(), work.is_completed()]
        return over

    assert on_one_device(program).results == [[True] * 30]
    assert len(made) <= 2
