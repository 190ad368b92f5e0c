"""One data iterator in several places of the list of a rank's chunks."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime.shared_iterators import told_apart
from megatron_pp.testing.toy import reference_run, toy_loss
from testkit.thread_runs.step_runs import DATA, Rank, pipeline

Iterators = Callable[[Iterator[Any], int], list[Any]]


def losses(rank: Rank, everywhere: bool, iterators: Iterators) -> list[float]:
    model = rank.model()
    numbers = rank.placement.stages[rank.rank]
    ends = (0, rank.placement.num_stages - 1)

    def forward_step(data_iterator: Iterator[Any], stage: Any) -> Any:
        draws = everywhere or numbers[model.index(stage)] in ends
        x, target = next(data_iterator) if draws else (None, None)
        return stage(x), lambda output: toy_loss(target, output)

    given = iterators(DATA.iterator(), len(model))
    return [float(report["loss"]) for report in rank.step(model, forward_step_func=forward_step, iterators=given)]


def repeated(iterator: Iterator[Any], count: int) -> list[Any]:
    return [iterator] * count


def of_its_own(iterator: Iterator[Any], count: int) -> list[Any]:
    return list(itertools.tee(iterator, count))


def run(schedule: str | None, everywhere: bool, iterators: Iterators) -> list[float]:
    """The losses, of the rank that has them."""
    fields = {} if schedule is None else {"pipeline_schedule": schedule}
    found = pipeline(2, 2, DATA.num_microbatches, lambda rank: losses(rank, everywhere, iterators), **fields)
    return next(own for own in found if own)


@pytest.mark.parametrize(
    ("schedule", "everywhere"), [(None, True), ("zb_v", True), ("zb_v", False), ("breadth_first", True)]
)
def test_two_chunks_that_draw_from_one_iterator_are_an_error(schedule: str | None, everywhere: bool) -> None:
    """In a V the first and the last stage are on one rank."""
    with pytest.raises(ScheduleInputError, match=r"model chunks [01] and [01] of this rank draw from one .* generator"):
        run(schedule, everywhere, repeated)
    assert run(schedule, everywhere, of_its_own) == reference_run(4, DATA).losses


def test_one_chunk_of_each_rank_may_draw_from_a_shared_iterator() -> None:
    """In a loop one rank has the first stage, and another one the last."""
    assert run(None, False, repeated) == reference_run(4, DATA).losses


class Batches:
    """An iterator with more than that, as Megatron's RerunDataIterator."""

    def __init__(self) -> None:
        self.place = 0

    def __next__(self) -> int:
        self.place += 1
        return self.place

    def __len__(self) -> int:
        return 7

    def rewind(self) -> None:
        self.place = 0


def test_a_shared_iterator_is_as_it_was_otherwise() -> None:
    batches = Batches()
    first, second, other = told_apart([batches, batches, None])
    assert other is None
    assert [next(first), next(first), len(first), bool(first)] == [1, 2, 7, True]
    assert isinstance(first, Batches)
    second.rewind()
    second.place = 5
    assert (batches.place, next(first), iter(first) is first) == (5, 6, True)
    with pytest.raises(ScheduleInputError, match="chunks 0 and 1 of this rank draw from one data iterator, a Batch"):
        next(second)
    assert batches.place == 6
    generator = (number for number in range(3))
    first, second = told_apart([generator, generator])
    assert isinstance(second, types.GeneratorType)
    assert list(second) == [0, 1, 2]


def test_unshared_iterators_and_other_objects_are_passed_unchanged() -> None:
    batches, others, listed = Batches(), Batches(), [1, 2]
    given = [batches, others, listed, listed, None, None]
    assert all(one is other for one, other in zip(told_apart(given), given, strict=True))
