"""A step that is called while another one of its pipeline runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_pp.errors import PipelinePeerError, ScheduleInputError
from testkit.thread_runs.step_runs import Rank, forward_with, pipeline

RUNNING = "a step of this pipeline was called while another one is running"


def _in_a_thread(call: Callable[[], object]) -> list[BaseException]:
    """What ``call`` raised in a thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive(), "the call has not returned"
    return raised


def _calling_once(call: Callable[[], object]) -> Any:
    """A forward_step_func that calls ``call`` in its second microbatch."""
    plain = forward_with(lambda loss: (loss, {"loss": loss.detach()}))
    seen: list[int] = []

    def step(data: Any, model: Any) -> Any:
        seen.append(1)
        if len(seen) == 2:
            call()
        return plain(data, model)

    return step


@pytest.mark.parametrize("inner", [{}, {"forward_only": True}], ids=["the same step", "another plan"])
def test_a_step_within_a_step_is_refused_on_every_rank(inner: dict[str, Any]) -> None:
    """Its messages would be received in place of those of the step around it."""

    def body(rank: Rank) -> str:
        model = rank.model()
        with pytest.raises((ScheduleInputError, PipelinePeerError)) as raised:
            rank.step(model, forward_step_func=_calling_once(lambda: rank.step(model, **inner)))
        return str(raised.value)

    assert all(RUNNING in text for text in pipeline(2, 1, 4, body, guarded=True))


def test_a_step_of_another_thread_is_refused_and_the_running_one_goes_on() -> None:
    def body(rank: Rank) -> tuple[list[BaseException], list[float], list[float]]:
        model = rank.model()
        expected = [float(one["loss"]) for one in rank.step(model)]
        raised: list[BaseException] = []
        step = _calling_once(lambda: raised.extend(_in_a_thread(lambda: rank.step(model))))
        found = [float(one["loss"]) for one in rank.step(model, forward_step_func=step)]
        again = [float(one["loss"]) for one in rank.step(model)]
        assert again == expected
        return raised, found, expected

    for raised, found, expected in pipeline(2, 1, 4, body, guarded=True):
        assert [type(one) for one in raised] == [ScheduleInputError]
        assert RUNNING in str(raised[0])
        assert found == expected


def test_a_step_that_failed_does_not_count_as_running() -> None:
    """Without a guard the communicator stays in use."""

    def body(rank: Rank) -> None:
        model = rank.model()

        def fails(data: Any, model: Any) -> Any:
            raise torch.OutOfMemoryError("none left")

        if rank.rank == 0:
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    rank.step(model, forward_step_func=fails)

    pipeline(2, 1, 4, body)
