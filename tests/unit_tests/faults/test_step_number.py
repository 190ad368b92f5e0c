"""Ranks that are in different steps, by the program's own number, are an error before any of them is run.

The nth call of one rank meets the nth call of the others, so that a call too many, or one left out, pairs all later
steps wrongly, and only that number shows it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import PipelineMismatchError, ScheduleInputError
from megatron_pp.faults.consistency import StepNumber
from testkit.thread_runs.guarded_ranks import Call, Outcome, published_entries, run_programs

SIZE = 3


def training(steps: int, evaluate_every: int = 0, first: int = 1) -> list[Call]:
    calls = []
    for number in range(first, first + steps):
        calls.append(Call(number=number))
        if evaluate_every and number % evaluate_every == 0:
            calls += [Call(number=number, forward_only=True)] * 2
    return calls


def error_of(outcome: Outcome) -> PipelineMismatchError:
    assert isinstance(outcome.error, PipelineMismatchError), outcome
    return outcome.error


@pytest.mark.parametrize("odd_one", range(SIZE))
def test_a_call_too_many_is_named_with_both_numbers(odd_one: int) -> None:
    programs = [training(6) for _ in range(SIZE)]
    programs[odd_one].insert(3, Call(number=3))
    for outcome in run_programs(programs):
        assert outcome.finished == 3
        error = error_of(outcome)
        assert error.field == "step_number"
        assert error.values[odd_one] == "3 (as in its last step)"
        assert {v for rank, v in error.values.items() if rank != odd_one} == {"4 (+1 since its last step)"}
        assert f"rank {odd_one} has 3" in str(error)


def test_ranks_that_begin_with_different_numbers() -> None:
    """This happens if ranks load checkpoints of different steps."""
    for outcome in run_programs([training(2, first=100), training(2, first=101), training(2, first=100)]):
        assert outcome.finished == 0
        assert error_of(outcome).values[1] == "101 (begins with 101)"


def test_a_rank_without_a_step_number_is_named() -> None:
    for outcome in run_programs([training(2), [Call()] * 2, training(2)]):
        assert error_of(outcome).values[1] == "none"


def test_step_number_changes_that_were_agreed_on_before_are_compared_in_the_background() -> None:
    """Two calls a number; rank 1 makes one too many."""
    programs = [[Call(number=number) for number in range(1, 2000) for _ in range(2)] for _ in range(SIZE)]
    programs[1].insert(8, Call(number=4))
    for outcome in run_programs(programs):
        assert error_of(outcome).field == "step_number"


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, SIZE - 1), st.integers(2, 6), st.integers(0, 4), st.booleans(), st.data())
def test_no_step_is_run_in_which_numbers_differ(
    odd_one: int, steps: int, evaluate_every: int, too_often: bool, data: st.DataObject
) -> None:
    programs = [training(steps, evaluate_every) for _ in range(SIZE)]
    mine = programs[odd_one]
    places = [n for n, call in enumerate(mine[:-1]) if not call.forward_only]
    place = data.draw(st.sampled_from(places))
    if too_often:
        mine.insert(place + 1, mine[place])
    else:
        del mine[place]
    for outcome in run_programs(programs):
        error_of(outcome)
        assert outcome.finished == place + too_often


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8))
def test_equal_step_numbers_never_differ(calls: list[tuple[int, bool]]) -> None:
    program = [Call(number=number, forward_only=only) for number, only in calls]
    assert run_programs([program] * SIZE) == [Outcome(len(program), None)] * SIZE


def test_a_number_that_counts_up_costs_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the first call, one for the first that counts up from it."""
    entries = published_entries(monkeypatch)
    assert run_programs([training(20)] * SIZE) == [Outcome(20, None)] * SIZE
    assert len(entries) == 2 * SIZE


def test_changes_of_the_step_number_are_described() -> None:
    numbers = StepNumber()
    assert [numbers.move(n) for n in (5, 6, 6, 7, 4)] == [
        "begins with 5",
        "+1 since its last step",
        "as in its last step",
        "+1 since its last step",
        "-3 since its last step",
    ]


def given_step_number(**fields: Any) -> int | None:
    return StepSettings.from_config(SimpleNamespace(**fields)).given_step_number()


def test_the_step_number_may_be_a_number_or_a_function() -> None:
    assert given_step_number() is None
    assert given_step_number(step_number=None) is None
    assert given_step_number(step_number=7) == 7
    assert given_step_number(step_number=lambda: 8) == 8
    for wrong in (1.5, "3", True, -1):
        with pytest.raises(ScheduleInputError, match="step_number"):
            given_step_number(step_number=wrong)
