"""If one of several real processes makes a mistake, every rank raises an error in the same step, and no earlier numbers
are wrong. The mistakes are data that end early, a step unlike that of its peers, a step that is called once too often,
and model chunks in the wrong order.

All cases run in the same processes; each case has its own process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_pp.errors import PipelineMismatchError
from megatron_pp.runtime.communicators import close_communicators
from megatron_pp.testing.toy import ToyData, reference_run
from testkit.process_ranks import rank_of
from testkit.processes import run_processes

SIZE = 3
STEPS = 8
ODD_STEP = 5


class Call(NamedTuple):
    """The arguments of one step. ``number`` is the program's number of the step."""

    number: int
    data: ToyData
    forward_only: bool = False


class Seen(NamedTuple):
    """The steps that a rank has finished, those with wrong losses, and the error that ended them."""

    finished: list[int]
    wrong: list[int]
    error: tuple[str, str] = ("", "")
    field: str = ""
    values: dict[int, str] | None = None


class ShortData(ToyData):
    """Says that it has four microbatches, and gives two."""

    def iterator(self) -> Iterator[Any]:
        return (self.microbatch(mb) for mb in range(2))


# the rank with short data, and the chunks of each rank
ENDED = {"data of the first rank": (0, 1), "data of the last rank": (2, 2)}
# The words of the error; the odd rank, and how every second step of all ranks differs from one of 4 microbatches.
UNLIKE: dict[str, tuple[int, dict[str, Any]]] = {
    "num_microbatches (M), first rank": (0, {"num_microbatches": 6}),
    "num_microbatches (M), last rank": (2, {"num_microbatches": 6}),
    # gloo ends the process if a message is longer than expected, and ignores a shorter one: neither may be sent.
    "the shape of, longer": (1, {"seq_length": 6}),
    "the shape of, shorter": (1, {"seq_length": 2}),
    "forward_only, last rank": (2, {"forward_only": True}),
}

SWAPPED = {"interleaved_1f1b": (1, 4), "zb_v": (1, 4)}  # the stages of rank 1


class Count(NamedTuple):
    """``odd_one`` calls ODD_STEP twice; all evaluate after every second step, and ``twice`` call each step twice."""

    odd_one: int | None
    evaluate: bool = False
    twice: bool = False


COUNTS = {
    "first": Count(0),
    "middle": Count(1, evaluate=True),
    "last": Count(2, evaluate=True),
    "agreed before": Count(0, twice=True),
    "nobody": Count(None, evaluate=True),
}


def unlike_calls(is_odd: bool, other: dict[str, Any]) -> Iterator[Call]:
    for number in range(1, STEPS + 1):
        way = {"num_microbatches": 4, "first": 100 * number}
        if number % 2 == 0 or (is_odd and number == ODD_STEP):
            way |= other
        forward_only = bool(way.pop("forward_only", False))
        yield Call(number, ToyData(**way), forward_only)


def counted_calls(rank: int, count: Count) -> Iterator[Call]:
    for number in range(1, STEPS + 1):
        data = ToyData(4, first=100 * number)
        for _ in range(1 + count.twice + (rank == count.odd_one and number == ODD_STEP)):
            yield Call(number, data)
        if count.evaluate and number % 2 == 0:
            yield Call(number, data, forward_only=True)


def _optimizer_step(rank: int) -> None:
    """A rank's own failure between steps, which its program handles, does not reach other ranks."""
    with contextlib.suppress(FloatingPointError):
        if rank == 1:
            raise FloatingPointError


def run(rank: int, calls: Iterator[Call], chunks: int = 1, counted: bool = False) -> Seen:
    number, seen = 0, Seen([], [])
    group = dist.new_group(list(range(SIZE)))
    fields: dict[str, Any] = {"p2p_timeout": 600.0}  # longer than the test's deadline
    if counted:
        fields |= {"step_number": lambda: number}
    try:
        for number, data, forward_only in calls:
            # Two communicators on one group, as Megatron's training and evaluation may have.
            overlap = counted and forward_only
            one = rank_of(chunks, data.num_microbatches, group=group, data=data, overlap_p2p_comm=overlap, **fields)
            result = one.run(forward_only=forward_only)
            if result.losses and result.losses != reference_run(SIZE * chunks, data).losses:
                seen.wrong.append(number)
            seen.finished.append(number)
            _optimizer_step(rank)
    except PipelineMismatchError as error:
        return seen._replace(error=(type(error).__name__, str(error)), field=error.field, values=error.values)
    except Exception as error:
        return seen._replace(error=(type(error).__name__, str(error)))
    finally:
        close_communicators()
    return seen


def swapped_chunks(rank: int, schedule: str) -> Seen:
    """Take a step of two chunks a rank. Rank 1 has its chunks in the wrong order."""
    group = dist.new_group(list(range(SIZE)))
    one = rank_of(2, 4, group=group, pipeline_schedule=schedule, p2p_timeout=600.0)
    chunks = one.model()
    try:
        one.step(chunks[::-1] if rank == 1 else chunks)
    except Exception as error:
        return Seen([], [], (type(error).__name__, str(error)))
    finally:
        close_communicators()
    return Seen([1], [])


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number


def layers_of_another_rank(rank: int) -> Seen:
    """Take a step of one chunk of two layers a rank. Ranks 0 and 1 have each other's layers."""
    group = dist.new_group(list(range(SIZE)))
    one = rank_of(1, 4, group=group, p2p_timeout=600.0)
    (chunk,) = one.model()
    first = 2 * (1, 0, 2)[rank] + 1
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList([Layer(first), Layer(first + 1)])
    try:
        one.step([chunk])
    except PipelineMismatchError as error:
        return Seen([], [], (type(error).__name__, str(error)), error.field, error.values)
    finally:
        close_communicators()
    return Seen([1], [])


def rank_main(rank: int, size: int) -> dict[str, Seen]:
    seen = {}
    for name, (odd_one, other) in UNLIKE.items():
        seen[name] = run(rank, unlike_calls(rank == odd_one, other))
    for name, count in COUNTS.items():
        seen[name] = run(rank, counted_calls(rank, count), counted=True)
    for name, (odd_one, chunks) in ENDED.items():
        data = (ShortData if rank == odd_one else ToyData)(4)
        seen[name] = run(rank, iter([Call(1, data)]), chunks)
    for schedule in SWAPPED:
        seen[schedule] = swapped_chunks(rank, schedule)
    seen["layers"] = layers_of_another_rank(rank)
    return seen


@pytest.fixture(scope="module")
def per_rank() -> list[dict[str, Seen]]:
    return run_processes(rank_main, SIZE, timeout=120.0, start_method="forkserver")


@pytest.mark.parametrize("name", UNLIKE)
def test_an_error_names_what_differs(per_rank: list[dict[str, Seen]], name: str) -> None:
    odd_one, _ = UNLIKE[name]
    for seen in (of[name] for of in per_rank):
        assert (seen.finished, seen.wrong) == ([*range(1, ODD_STEP)], [])
        assert seen.field.startswith(name.partition(",")[0])
        assert seen.values is not None
        assert len(set(seen.values.values())) == 2
        assert odd_one in seen.values
        assert seen.error[0] == "PipelineMismatchError"
        assert "do not agree on" in seen.error[1]


@pytest.mark.parametrize("name", [name for name in COUNTS if name != "nobody"])
def test_every_rank_learns_which_numbers_met(per_rank: list[dict[str, Seen]], name: str) -> None:
    count = COUNTS[name]
    for seen in (of[name] for of in per_rank):
        assert seen.wrong == []
        assert seen.finished[-1] == ODD_STEP, seen
        assert seen.finished.count(ODD_STEP) == 1 + count.twice
        assert seen.field == "step_number"
        assert seen.values is not None
        assert seen.values[count.odd_one] == f"{ODD_STEP} (as in its last step)"
        assert f"{ODD_STEP + 1} (+1 since its last step)" in seen.values.values()
        assert f"rank {count.odd_one} has {ODD_STEP}" in seen.error[1]


def test_equal_step_numbers_raise_nothing(per_rank: list[dict[str, Seen]]) -> None:
    numbers = [call.number for call in counted_calls(0, COUNTS["nobody"])]
    assert [of["nobody"] for of in per_rank] == [Seen(numbers, [])] * SIZE


@pytest.mark.parametrize("name", ENDED)
def test_data_that_end_early_are_named(per_rank: list[dict[str, Seen]], name: str) -> None:
    short, _ = ENDED[name]
    sentence = "the data iterator of chunk 0 ended at microbatch 2; a step of 4 microbatches needs that many items"
    errors = [of[name].error for of in per_rank]
    kind, words = errors[short]
    assert kind == "ScheduleInputError"
    assert words.startswith(sentence)
    for kind, words in errors[:short] + errors[short + 1 :]:
        assert kind == "PipelinePeerError", errors
        assert f"rank {short}" in words
        assert sentence in words


@pytest.mark.parametrize("schedule", SWAPPED)
def test_chunks_in_the_wrong_order_are_named(per_rank: list[dict[str, Seen]], schedule: str) -> None:
    """Without the check the step ends well on all ranks, with wrong losses and gradients."""
    first, last = SWAPPED[schedule]
    sentence = (
        f"chunk 0 on rank 1 is stage {first} under {schedule}: build it with stage_numbers; "
        f"this one was built with PipelineStage(stage={last})"
    )
    errors = [of[schedule].error for of in per_rank]
    assert errors[1][0] == "ScheduleInputError"
    assert errors[1][1].startswith(sentence)
    for kind, words in (errors[0], errors[2]):
        assert kind == "PipelinePeerError", errors
        assert "rank 1" in words
        assert sentence in words


def test_layers_of_another_rank_are_named_on_all(per_rank: list[dict[str, Seen]]) -> None:
    for seen in (of["layers"] for of in per_rank):
        assert seen.error[0] == "PipelineMismatchError"
        assert (seen.field, seen.values) == (
            "the order of the layers",
            {
                0: "layers 3 to 4 in chunk 0 (stage 0)",
                1: "layers 1 to 2 in chunk 0 (stage 1), where numbers above 4 belong: build each chunk for its stage",
            },
        )
