"""Numbers of all ranks of a pipeline on one of them, over the job's store, while steps go on."""

from __future__ import annotations

import gc
import logging
import statistics
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_pp.features.measuring.metrics import StepMetrics
from megatron_pp.features.measuring.rank_numbers import _GATHERED, RankNumbers, rank_numbers
from megatron_pp.integrations.megatron.steps.tensorboard import PipelineScalars, TensorBoardScalars
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.toy import ToyBlock
from testkit.thread_runs.step_runs import pipeline

SECONDS = 20.0


def ranks_on(store: Any, size: int) -> list[RankNumbers]:
    """The last one reads."""
    made = [RankNumbers(store, "pipeline", rank, size) for rank in range(size)]
    made[-1].reads = True
    return made


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.01)
    raise AssertionError("nothing came")


@pytest.fixture
def ranks() -> Any:
    made = ranks_on(dist.HashStore(), 3)
    yield made
    for one in made:
        one.close()


def test_a_step_is_there_once_every_rank_has_given_its_numbers(ranks: list[RankNumbers]) -> None:
    for rank, one in enumerate(ranks[1:], 1):
        one.post(7, [rank, 0.5])
    time.sleep(0.3)
    assert ranks[-1].take() == [], "the first rank lags behind"
    ranks[0].post(7, [0, 0.25])
    assert until(ranks[-1].take) == [(7, [[0.0, 0.25], [1.0, 0.5], [2.0, 0.5]])]
    assert ranks[-1].take() == ranks[0].take() == []


def test_steps_of_a_rank_that_has_ended_are_left_out_without_a_wait(ranks: list[RankNumbers]) -> None:
    began = time.monotonic()
    for step in range(1, 40):
        for one in ranks[1:]:
            one.post(step, [step])
        assert ranks[-1].take() == []
    assert time.monotonic() - began < 1.0
    assert len(ranks[-1]._waiting) <= 8
    ranks[0].post(39, [0])
    assert until(ranks[-1].take) == [(39, [[0.0], [39.0], [39.0]])]


def test_calls_of_one_step_and_steps_that_come_again_are_told_apart(ranks: list[RankNumbers]) -> None:
    for rank, one in enumerate(ranks):
        for step, value in ((5, 1), (5, 2), (2, 3), (5, 4)):
            one.post(step, [10 * value + rank])
    found: list[Any] = []
    until(lambda: (found.extend(ranks[-1].take()), len(found) == 4)[1])
    assert found == [(step, [[10.0 * v + rank] for rank in range(3)]) for step, v in ((5, 1), (5, 2), (2, 3), (5, 4))]


def test_a_job_that_makes_its_pipeline_again_does_not_see_old_numbers() -> None:
    store = dist.HashStore()
    for value in (1, 2):
        made = ranks_on(store, 2)
        made[1].post(1, [value])
        time.sleep(0.3)
        assert made[1].take() == []
        made[0].post(1, [value])
        assert until(made[1].take) == [(1, [[float(value)]] * 2)]
        for one in made:
            one.close()


class Gone:
    """A store whose process ends."""

    def __init__(self) -> None:
        self.inner, self.calls = dist.HashStore(), 0

    def add(self, *args: Any) -> int:
        return self.inner.add(*args)

    def set(self, *args: Any) -> None:
        self.calls += 1
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_loses_numbers_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = Gone()
    one = ranks_on(store, 2)[1]
    for step in range(5):
        one.post(step, [1.0])
        until(lambda: one._closed)
    assert one.take() == []
    assert store.calls == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.message == "numbers of metrics are lost from now on: the job's store failed: Connection reset by peer"


class Stuck(Gone):
    """A store that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def set(self, *args: Any) -> None:
        self.end.wait(SECONDS)


@pytest.mark.slow
def test_training_does_not_wait_for_a_store_that_does_not_answer() -> None:
    store = Stuck()
    one = ranks_on(store, 2)[1]
    began = time.monotonic()
    for step in range(100):
        one.post(step, [1.0])
        assert one.take() == []
    assert time.monotonic() - began < 1.0
    one.close()
    assert time.monotonic() - began < 4.0, "it does not wait for its thread"
    store.end.set()


def test_rank_numbers_are_closed_with_their_transport() -> None:
    network = MemoryNetwork(2, store=dist.HashStore())
    transport = network.transport(0)
    kept = rank_numbers(transport, False)
    assert rank_numbers(transport, True) is kept
    assert kept.reads
    kept.post(1, [1.0])
    thread = kept._thread
    found = weakref.ref(kept)
    del kept, transport, network
    gc.collect()
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()
    _GATHERED.items()  # it drops what belongs to transports that are gone
    gc.collect()
    assert found() is None


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = defaultdict(dict)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert step not in self.scalars[name]
        self.scalars[name][step] = value


def test_scalars_are_the_mean_and_the_max_over_all_ranks() -> None:
    """On three ranks, the last of which has the writer, every second step."""
    writer, last, told = Writer(), threading.local(), defaultdict[int, dict[int, StepMetrics]](dict)
    loop: Any = ModuleType("megatron.training.global_vars")
    loop.get_tensorboard_writer = lambda: writer if getattr(last, "here", False) else None
    loop._GLOBAL_ARGS = SimpleNamespace(tensorboard_dir="a folder")
    given = PipelineScalars.__call__

    def noted(self: PipelineScalars, step: int, numbers: StepMetrics) -> None:
        told[self.numbers._rank][step] = numbers
        given(self, step, numbers)

    def rank_main(rank: Any) -> None:
        last.here = rank.rank == 2
        chunks = rank.model(ToyBlock)
        for _ in range(6):
            rank.step(chunks)
            rank.step(chunks, forward_only=True)
        if last.here:
            sink = TensorBoardScalars(writer, 2)
            until(
                lambda: (
                    sink.of_pipeline(rank.communicator.transport) and len(writer.scalars["pipeline/time max (ms)"]) == 3
                )
            )

    with mock.patch.dict(sys.modules, {loop.__name__: loop}), mock.patch.object(PipelineScalars, "__call__", noted):
        pipeline(3, 1, 4, rank_main, metrics=2, guarded=True)
    assert {rank: sorted(steps) for rank, steps in told.items()} == {rank: [1, 3, 5] for rank in range(3)}
    parts: dict[str, Callable[[StepMetrics], float]] = {
        "bubble {}": lambda one: one.bubble,
        "exposed wait {} (ms)": lambda one: 1e3 * one.exposed_wait,
        "time {} (ms)": lambda one: 1e3 * one.pipeline,
    }
    assert len(writer.scalars) == 2 * len(parts)
    for name, part in parts.items():
        for which, over in (("mean", statistics.fmean), ("max", max)):
            found = writer.scalars["pipeline/" + name.format(which)]
            assert sorted(found) == [2, 4, 6]
            for step, value in found.items():
                assert value == pytest.approx(over([part(told[rank][step - 1]) for rank in range(3)]), rel=1e-12)


def test_only_the_pipeline_of_the_writer_measures() -> None:
    transport = MemoryNetwork(2, store=dist.HashStore()).transport(0)
    with mock.patch.multiple(dist, is_initialized=lambda: True, get_world_size=lambda: 4):
        assert TensorBoardScalars(None, 2).of_pipeline(transport) is None
    assert TensorBoardScalars(None, 2).of_pipeline(transport) is not None


def test_metrics_of_ranks_without_a_store_log_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert TensorBoardScalars(Writer(), 3).of_pipeline(MemoryNetwork(2).transport(0)) is None
    assert [one.message for one in caplog.records] == [
        "metrics=3 writes nothing: the ranks of the pipeline share no store"
    ]


def test_one_rank_alone_needs_no_store() -> None:
    writer = Writer()
    found = TensorBoardScalars(writer, 1).of_pipeline(MemoryNetwork(1).transport(0))
    assert found is not None
    found(0, StepMetrics(2.0, 1.0, 0.5))
    assert writer.scalars["pipeline/bubble mean"] == writer.scalars["pipeline/bubble max"] == {1: 0.5}
