"""Every schedule under every policy gives the losses and gradients of a single process, to the last bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, ToyResult, reference_run
from tests.harness.sweeps import EXHAUSTIVE

POLICIES: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_p2p_comm": True},
    "batched": {"batch_p2p_comm": True},
    "plain": {},
}


def microbatch_counts(pipeline_size: int) -> list[int]:
    p = pipeline_size
    return sorted({1, max(1, p - 1), p, 2 * p, 2 * p + 1, 3 * p + 2})


def ways(pipeline_size: int, num_chunks: int) -> list[tuple[int, bool]]:
    """Group sizes and directions."""
    p = pipeline_size
    groups = [p, p + 1, 2 * p] if num_chunks > 1 else [p]
    return list(itertools.product(groups, (False, True)))


def mismatches(
    pipeline_size: int,
    num_chunks: int,
    num_microbatches: int,
    variable: bool = False,
    turn: int | None = None,
    **fields: Any,
) -> list[str]:
    """The combinations of policy, group size and direction whose result is not that of a single process.

    With ``turn`` one group size and direction for each policy; as it counts up, each policy meets all of them.
    """
    data = ToyData(num_microbatches, variable=variable)
    whole = reference_run(pipeline_size * num_chunks, data)
    expected = {False: whole, True: ToyResult(whole.losses)}
    all_ways = ways(pipeline_size, num_chunks)
    wrong = []
    for number, (policy, flags) in enumerate(POLICIES.items()):
        some = all_ways if turn is None or EXHAUSTIVE else [all_ways[(turn + number) % len(all_ways)]]
        for group, forward_only in some:
            result = run_in_threads(
                pipeline_size,
                num_chunks,
                data,
                forward_only=forward_only,
                microbatch_group_size_per_vp_stage=group,
                **flags,
                **fields,
            )
            difference = result.difference(expected[forward_only])
            if difference != 0.0:
                what = "forward only" if forward_only else "training"
                wrong.append(f"{policy}, group size {group}, {what}, M={num_microbatches}: off by {difference}")
    return wrong


def over_all_counts(pipeline_size: int, num_chunks: int, variable: bool = False, **fields: Any) -> list[str]:
    """``mismatches`` of every second number of microbatches, each with the next turn; varying shapes, and odd numbers
    of chunks, have the other numbers.

    Group size, direction and policy meet in pairs with each other.
    """
    first = len(ways(pipeline_size, num_chunks)) // 2 if variable else 0
    counts = microbatch_counts(pipeline_size)
    some = counts if EXHAUSTIVE else counts[(num_chunks + variable) % 2 :: 2]
    return [
        text
        for turn, count in enumerate(some, first)
        for text in mismatches(pipeline_size, num_chunks, count, variable, turn, **fields)
    ]


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("pipeline_size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_default_schedules_equal_one_process(pipeline_size: int, num_chunks: int, variable: bool) -> None:
    assert over_all_counts(pipeline_size, num_chunks, variable) == []


@pytest.mark.parametrize(("schedule", "num_chunks"), [("gpipe", 1), ("breadth_first", 2), ("interleaved_1f1b", 1)])
@pytest.mark.parametrize("pipeline_size", [2, 4])
def test_named_schedules_equal_one_process(schedule: str, num_chunks: int, pipeline_size: int) -> None:
    assert over_all_counts(pipeline_size, num_chunks, pipeline_schedule=schedule) == []


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("pipeline_size", [2, 4])
def test_shared_channels_equal_one_process(pipeline_size: int, num_chunks: int) -> None:
    """Six kinds of data, in which each policy meets all six combinations of group size and direction."""
    kinds = itertools.product((False, True), (pipeline_size, 2 * pipeline_size, 2 * pipeline_size + 1))
    wrong = [
        text
        for turn, (variable, count) in enumerate(kinds)
        for text in mismatches(pipeline_size, num_chunks, count, variable, turn, p2p_channels="shared")
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("max_pending_sends", [0, 1, 5])
def test_release_distance_does_not_change_numbers(max_pending_sends: int) -> None:
    assert mismatches(3, 2, 7, max_pending_sends=max_pending_sends) == []


def test_without_deallocation_the_numbers_are_the_same() -> None:
    assert mismatches(3, 2, 7, deallocate_pipeline_outputs=False) == []


def test_the_comparison_sees_one_wrong_bit() -> None:
    """The standard itself: a single unit in the last place of one gradient, a lost loss and a missing gradient are
    differences.
    """
    result, other = reference_run(2, ToyData(2)), reference_run(2, ToyData(2))
    assert result.difference(other) == 0.0
    other.grads["0.scale"][0] = other.grads["0.scale"][0].nextafter(other.grads["0.scale"].new_tensor(9e9))
    assert result.difference(other) > 0.0
    assert result.difference(ToyResult(result.losses[:1], result.grads)) == float("inf")
    assert result.difference(ToyResult(result.losses, {})) == float("inf")
