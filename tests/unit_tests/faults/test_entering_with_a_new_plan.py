"""A rank that enters a step with another plan than its last one must not be compared by the last one.

Between its first sign of life in the step and its new entry the others see its old entry. (Seen once in a hundred
changes of plan over 4 processes, as a mismatch that was none.)
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_pp.faults.consistency import find_mismatch
from megatron_pp.faults.records import DONE, ENTERING, IN_STEP, Entry, Progress
from megatron_pp.faults.tracker import Tracker
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec

PROCESS = Tracker(0, 2).process
NEW, OLD = {"schedule": "interleaved_1f1b"}, {"schedule": "1f1b"}


def progress(step: int, state: str) -> Progress:
    return Progress(step, state, 0, "", 0.0, 0, PROCESS)


@pytest.mark.parametrize(
    ("state", "step", "mismatch"),
    [
        (ENTERING, 2, False),  # it has not yet published what it enters with
        (IN_STEP, 2, True),  # it is in the step with the plan of the step before
        (DONE, 2, True),
        (IN_STEP, 1, False),  # it is not there yet
    ],
)
def test_only_a_rank_past_its_entry_is_compared_by_an_old_one(state: str, step: int, mismatch: bool) -> None:
    entries = {0: Entry(2, NEW, PROCESS), 1: Entry(1, OLD, PROCESS)}
    found = find_mismatch(0, entries, {1: progress(step, state)}, 2)
    assert (found is not None) == mismatch


def test_a_new_entry_is_always_compared() -> None:
    entries = {0: Entry(2, NEW, PROCESS), 1: Entry(2, OLD, PROCESS)}
    found = find_mismatch(0, entries, {1: progress(2, ENTERING)}, 2)
    assert found is not None
    assert found.field == "schedule"


def test_a_rank_is_not_compared_by_its_own_old_entry() -> None:
    """The others' new entries may be read before this rank's own has arrived in the store."""
    entries = {0: Entry(1, OLD, PROCESS), 1: Entry(2, NEW, PROCESS)}
    assert find_mismatch(0, entries, {1: progress(2, ENTERING)}, 2) is None


def test_the_first_sign_of_a_step_says_that_plans_are_compared() -> None:
    """Otherwise the sign would say "in the step", which with the old entry is a mismatch."""
    tracker = Tracker(0, 2)
    source = SimpleNamespace(plan=build_plan(PlanSpec("1f1b", 2, 1, 2)), position=0)
    tracker.begin(source, entering=True)
    seen = tracker.observe()
    assert seen is not None
    assert (seen.step, seen.state) == (1, ENTERING)
    tracker.agreed(1)
    seen = tracker.observe()
    assert seen is not None
    assert seen.state == IN_STEP
    tracker.end()
    tracker.begin(source)
    seen = tracker.observe()
    assert seen is not None
    assert (seen.step, seen.state) == (2, IN_STEP)
