"""A plan that was agreed on once costs nothing when the ranks come back to it; ranks that come back to different ones
get an error."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from megatron_pp.errors import PipelineError, PipelineMismatchError
from megatron_pp.faults import layer_order
from megatron_pp.faults.consistency import (
    LAYERS,
    RECEIVES,
    SENDS,
    Agreements,
    arrived,
    changed,
    find_mismatch,
    have_gone_on,
    last_change,
)
from megatron_pp.faults.histories import Difference, difference, entries_in, find_late_mismatch, in_force
from megatron_pp.faults.position.tracker import Outside, Tracker
from megatron_pp.faults.store.records import DONE, ENTERING, IN_STEP, Entry, Progress
from megatron_pp.testing.threads import run_ranks
from testkit.thread_runs.guarded_ranks import Call, Outcome, published_entries, run_programs
from testkit.thread_runs.step_runs import Rank, pipeline
from tests.unit_tests.faults.guards import new_guard, new_source

SIZE = 3
M = "num_microbatches (M)"

# -- histories ---


def test_a_history_says_what_was_used_in_which_step() -> None:
    history = (9, 0, 1, 1, 4, 2, 6, 1)
    assert [in_force(history, step) for step in (0, 1, 3, 4, 5, 6, 9, 10)] == [0, 1, 1, 2, 2, 1, 1, 0]
    assert last_change(history) == 6
    assert (in_force((), 1), last_change((0,)), last_change((0, 0))) == (0, 0, 0)


def test_a_history_is_short() -> None:
    changes: tuple[int, ...] = ()
    for step in range(1, 101):
        changes = changed(changes, step, 1 + step % 2)
    assert len(changes) == 1 + 2 * 32
    assert changes[-2:] == (100, 1)


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        ((5, 0, 1, 1), (5, 0, 1, 1), None),
        ((5, 0, 1, 1, 4, 2), (5, 0, 1, 1, 4, 2), None),
        ((5, 0, 1, 1, 4, 2), (5, 0, 1, 1), Difference(4, 2, 1)),  # only one changed
        ((5, 0, 1, 1, 4, 2), (3, 0, 1, 1), None),  # the other is not there yet
        ((5, 0, 1, 1, 4, 2), (4, 0, 1, 1, 4, 3), Difference(4, 2, 3)),
        ((9, 0, 1, 1, 4, 2, 5, 1), (9, 0, 1, 1, 4, 3, 5, 1), Difference(4, 2, 3)),  # and back again
        ((0, 0), (0,), None),  # neither has agreed on anything
        ((), (3, 0, 1, 1), None),  # the record of a rank that says nothing
    ],
)
def test_difference_finds_the_first_step_in_which_two_histories_differ(
    mine: Any, theirs: Any, found: Difference | None
) -> None:
    assert difference(mine, theirs) == found
    assert difference(theirs, mine) == (None if found is None else Difference(found.step, found.theirs, found.mine))


def test_a_difference_that_is_long_past_is_still_one() -> None:
    changes: dict[str, tuple[int, ...]] = {"one": (), "same": (), "other": ()}
    for step in range(1, 101):
        for name in changes:
            changes[name] = changed(changes[name], step, 3 if (name, step) == ("other", 20) else 1 + step % 2)
    one, same, other = ((100, *part) for part in changes.values())
    assert difference(one, same) is None
    assert difference(one, other) == Difference(one[2], 0, 0)


def test_agreements_are_found_again_and_the_oldest_are_forgotten() -> None:
    agreements = Agreements()
    assert agreements.use("a") == 0
    assert [agreements.add(key, {0: {"M": key}}) for key in ("a", "b")] == [1, 2]
    assert (agreements.use("a"), agreements.use("b"), agreements.use("a")) == (1, 2, 1)
    assert agreements.description(2, 0) == {"M": "b"}
    for n in range(63):
        agreements.add(n, {})
    assert (agreements.use("a"), agreements.use("b")) == (1, 0)  # b was used longest ago
    assert agreements.description(2, 0) is None


# -- who differs, in words ---


def _agreements() -> Agreements:
    agreements = Agreements()
    for m in ("4", "6"):
        agreements.add(m, {rank: {M: m} for rank in range(SIZE)})
    return agreements


class Case(NamedTuple):
    """Rank ``own`` enters ``step``, has read ``entries``, and knows of rank 1 what ``there`` says; ``values`` are those
    of ``field`` that differ, by rank (without a field, nothing does)."""

    entries: dict[int, Entry]
    field: str = ""
    values: dict[int, str] = {}  # noqa: RUF012 (never written to)
    own: int = 0
    step: int = 1
    there: Progress | None = None


def both(mine: tuple[int, dict[str, str]], theirs: tuple[int, dict[str, str]]) -> dict[int, Entry]:
    return {0: Entry(*mine), 1: Entry(*theirs)}


ALIKE = {rank: Entry(1, {"schedule": "1f1b", M: "8"}) for rank in range(3)}
ODD_ONE = {rank: Entry(1, {"policy": "overlap", "shape": "8" if rank == 2 else "4"}) for rank in range(3)}
ONE_LACKS = both((1, {"a": "1"}), (1, {"a": "1", "b": "2"}))
FITS = both((1, {SENDS: "a", RECEIVES: "x"}), (1, {SENDS: "b", RECEIVES: "a"}))
BROKEN = both((1, {SENDS: "a", RECEIVES: "x"}), (1, {SENDS: "b", RECEIVES: "c"}))
STAYS = both((5, {M: "8"}), (1, {M: "4"}))  # rank 1 goes on with its plan, or has not published its new one yet
BOTH_NEW = both((5, {M: "8"}), (5, {M: "4"}))
GOES_BACK = both((3, {M: "8"}), (2, {M: "6"}))  # to agreement 1, its last entry being of agreement 2
CASES = {
    "alike": Case(ALIKE),
    **{f"rank 2 differs, seen by {own}": Case(ODD_ONE, "shape", {own % 2: "4", 2: "8"}, own) for own in range(3)},
    "a field that one lacks": Case(ONE_LACKS, "b", {0: "nothing", 1: "2"}),
    "what is sent is received": Case(FITS),
    **{f"what is sent is not, seen by {own}": Case(BROKEN, SENDS, {0: "a", 1: "c"}, own) for own in range(2)},
    "it is not there yet": Case(STAYS, step=5, there=Progress(4, IN_STEP)),
    "it has not yet published": Case(STAYS, step=5, there=Progress(5, ENTERING)),
    "it is in the step with its old plan": Case(STAYS, M, {0: "8", 1: "4"}, step=5, there=Progress(5, IN_STEP)),
    "it was in the step with its old plan": Case(STAYS, M, {0: "8", 1: "4"}, step=5, there=Progress(5, DONE)),
    "new entries are always compared": Case(BOTH_NEW, M, {0: "8", 1: "4"}, step=5, there=Progress(5, ENTERING)),
    # The other's new entry may be read before this rank's own has arrived in the store.
    "its own old entry is not": Case(both((1, {M: "4"}), (5, {M: "8"})), step=5, there=Progress(5, ENTERING)),
    "it came back to an old plan": Case(
        GOES_BACK, M, {0: "8", 1: "4"}, step=3, there=Progress(3, IN_STEP, history=(3, 0, 1, 1, 2, 2, 3, 1))
    ),
}


def test_a_rank_that_has_passed_the_step_is_not_compared() -> None:
    """It does so only after all have agreed, and may have entered its next step with another plan."""
    assert find_mismatch(0, both((5, {M: "8"}), (6, {M: "4"})), 5) is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_mismatch_names_the_rank_and_the_field(case: Case) -> None:
    there = {} if case.there is None else {1: case.there}
    entries = entries_in(case.step, case.entries, there, _agreements())
    assert (entries == case.entries) != have_gone_on(case.entries, there, case.step)
    found = find_mismatch(case.own, entries, case.step)
    assert (found is None) == (not case.field)
    if found is not None:
        assert found.field == case.field or case.field == SENDS
        assert found.values.items() >= case.values.items()
        assert case.field == SENDS or f"do not agree on {case.field}" in str(found)
        assert all(f"rank {rank} has {value}" in str(found) for rank, value in found.values.items())
    assert arrived(case.entries, 5) == {rank for rank, entry in case.entries.items() if entry.step == 5}


def test_a_late_mismatch_is_named_from_earlier_agreements() -> None:
    mine = (5, 0, 1, 1, 2, 2)
    there = {1: Progress(5, IN_STEP, history=mine), 2: Progress(5, IN_STEP, history=(*mine, 5, 1))}
    found = find_late_mismatch(0, Progress(5, IN_STEP, history=mine), there, _agreements())
    assert found is not None
    assert (found.field, found.values) == (M, {0: "6", 2: "4"})


def layers(*of_rank: str) -> dict[int, Entry]:
    return {rank: Entry(1, {LAYERS: text} if text else {}) for rank, text in enumerate(of_rank)}


@pytest.mark.parametrize(
    ("entries", "values"),
    [
        (layers("layers 1 to 2 in chunk 0 (stage 0)", "layers 3 to 9 in chunk 0 (stage 1)"), {}),
        (layers("layers 1 to 2 in chunk 0 (stage 0)", "", "layers 3 to 3 in chunk 0 (stage 2)"), {}),
        (layers("layers 1 to 2 in chunk 0 (stage 0)", "layers 7 to 7 in chunk 0 (stage 1)"), {}),  # some were removed
        (layers("", "", ""), {}),
        (layers("layers of no sense", "layers 1 to x in chunk 0 (stage 1); \x00"), {}),
        (
            layers(
                "layers 1 to 1 in chunk 0 (stage 0); layers 4 to 4 in chunk 1 (stage 3)",
                "layers 3 to 3 in chunk 0 (stage 2); layers 2 to 2 in chunk 1 (stage 1)",
            ),
            {},
        ),
        (
            layers("layers 1 to 2 in chunk 0 (stage 0)", "layers 2 to 3 in chunk 0 (stage 1)"),
            {0: "layers 1 to 2 in chunk 0 (stage 0)", 1: "layers 2 to 3 in chunk 0 (stage 1), where numbers above 2"},
        ),
        (
            layers("layers 9 to 9 in chunk 0 (stage 0)", "", "layers 10 to 9 in chunk 0 (stage 9)", "layers 1 to 2 in "
            "chunk 4 (stage 40)"),
            {2: "layers 10 to 9 in chunk 0 (stage 9)", 3: "layers 1 to 2 in chunk 4 (stage 40), where numbers above 9"},
        ),
    ],
)  # fmt: skip
def test_layers_have_higher_numbers_on_later_stages(entries: dict[int, Entry], values: dict[int, str]) -> None:
    found = layer_order.find_mismatch(entries, 1)
    assert (found is not None) == bool(values)
    if found is not None:
        assert found.field == LAYERS
        assert all(found.values[rank].startswith(value) for rank, value in values.items())
        assert layer_order.find_mismatch(entries, 2) is None, "of another step"
    assert find_mismatch(0, entries, 1) is None, "that they differ is no mismatch"


# -- ranks as threads ---


def _run(
    microbatches: Callable[[int, int], int],
    steps: int,
    pause: float = 0.0,
    fields_of: Callable[[int], dict[str, Any]] = lambda rank: {},
) -> list[Outcome]:
    def program(rank: int) -> Iterator[Call]:
        for step in range(1, steps + 1):
            time.sleep(pause)
            yield Call(microbatches(rank, step))

    return run_programs([program(rank) for rank in range(SIZE)], fields_of)


def test_only_new_plans_are_compared_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six changes of plan, two plans: two comparisons, on each rank."""
    entries = published_entries(monkeypatch)
    assert _run(lambda rank, step: 4 + 2 * (step % 2), steps=7) == [Outcome(7, None)] * SIZE
    assert len(entries) == 2 * SIZE


@pytest.mark.parametrize("odd_one", range(SIZE))
def test_ranks_that_come_back_to_different_plans(odd_one: int) -> None:
    """Steps 1 to 4 alternate between 6 and 4 microbatches; in step 5 one rank takes 4 where the others take 6. This
    transport does not keep plans apart, so that the last rank gets along with what the others send for a while."""
    raised = _run(lambda rank, step: 4 if step % 2 == 0 or (rank, step) == (odd_one, 5) else 6, 200, pause=0.03)
    for _, error in raised:
        assert isinstance(error, PipelineMismatchError), error
        assert error.field == M
        assert set(error.values.values()) == {"4", "6"}
        assert error.values.get(odd_one, "4") == "4"
        assert f"rank {odd_one} has 4" in str(error)


def test_a_rank_with_a_new_plan_and_a_rank_with_an_old_plan_raise_a_mismatch() -> None:
    raised = _run(lambda rank, step: 8 if (rank, step) == (1, 5) else 4 + 2 * (step % 2), steps=6)
    for _, error in raised:
        assert isinstance(error, PipelineMismatchError), error
        assert error.values[1] == "8"
        assert set(error.values.values()) == {"6", "8"}


def test_a_rank_that_alone_checks_its_transfers() -> None:
    """Peers would take the descriptions that it sends for tensors."""
    raised = _run(lambda rank, step: 4, 1, fields_of=lambda rank: {"p2p_debug": rank == 1})
    for _, error in raised:
        assert isinstance(error, PipelineMismatchError), error
        assert error.field == "p2p_debug"


# -- however a guard's threads take turns with the rank's own ---------------------------------------------------------


STEPS = 400


@pytest.fixture(params=[1e-6, 1e-4], ids=["1us", "100us"])
def _turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Python lets another thread run after that many seconds rather than 5 ms: also between two assignments."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


def test_a_rank_seen_at_rest_does_not_tell_of_the_step_that_it_begins() -> None:
    """Else it would be taken to have entered that step with what it agreed on in the one before."""
    source, tracker = new_source(), Tracker(0, 2)
    tracker.begin(source, entering=True)
    tracker.agreed(1)
    tracker.end()
    assert tracker.observe() is None
    tracker.begin(source, entering=True)  # by the other thread, before this one has asked for what is finished
    record = tracker.finished()
    assert (record.step, record.state, record.history) == (1, DONE, (1, 0, 1, 1))


def test_the_first_sign_of_a_step_says_that_plans_are_compared() -> None:
    """Otherwise the sign would say "in the step", which with the old entry is a mismatch."""
    source, tracker = new_source(), Tracker(0, 2)
    tracker.begin(source, entering=True)
    seen = [tracker.observe()]
    tracker.agreed(1)
    seen.append(tracker.observe())
    tracker.end()
    tracker.begin(source)
    seen.append(tracker.observe())
    assert [record and (record.step, record.state) for record in seen] == [(1, ENTERING), (1, IN_STEP), (2, IN_STEP)]


def test_the_same_work_again_is_not_idle_since_the_first_time() -> None:
    """Else a rank that takes an hour between two optimizer steps would be in a stall at the second."""
    tracker = Tracker(0, 2)
    for _ in range(2):
        begun = time.monotonic()
        tracker.begin(Outside(), phase="the optimizer")
        seen = tracker.observe()
        assert seen is not None
        assert seen.idle <= time.monotonic() - begun + 0.001
        time.sleep(0.02)  # the place does not change
        tracker.end()


def _keys(seed: int) -> Iterator[int]:
    """Plans of a job: new ones, some of the last few again, and the same as before."""
    draw, newest, key = random.Random(seed), 0, 0
    while True:
        yield key
        choice = draw.random()
        if choice < 0.3:
            newest += 1
            key = newest
        elif choice < 0.7:
            key = draw.randint(max(0, newest - 6), newest)


@pytest.mark.slow
@pytest.mark.usefixtures("_turns")
def test_ranks_that_change_plans_together_never_differ() -> None:
    store = dist.HashStore()

    def train(rank: int) -> int:
        guard, source = new_guard(rank, store, timeout=20.0, size=SIZE)
        own = random.Random(rank)
        for step, key in zip(range(STEPS), _keys(seed=1), strict=False):
            if own.random() < 0.05:
                time.sleep(own.random() * 0.02)
            around = guard.watch("the training step") if step % 4 == 0 else nullcontext()
            with around, guard.step(source, key, lambda: {"plan": str(key)}):  # noqa: B023 (called at once)
                pass
        guard.close()
        return step

    assert run_ranks(SIZE, train, lambda: None, timeout=60.0) == [STEPS - 1] * SIZE


@pytest.mark.parametrize("boundary", [0, 1])
def test_shapes_that_change_between_two_of_three_ranks(boundary: int) -> None:
    """The third rank does not know of that, and takes part in no agreement on it."""

    def train(rank: Rank) -> PipelineError | None:
        model = rank.model()
        rank.step(model)

        def longer(receive: Any, send: Any) -> Any:
            return (
                receive if rank.rank != boundary + 1 else [(5, 2, 4)],
                send if rank.rank != boundary else [(5, 2, 4)],
            )

        try:
            rank.step(model, adjust_tensor_shapes_fn=longer)
        except PipelineError as error:
            return error
        return None

    begun = time.monotonic()
    for error in pipeline(SIZE, 1, 3, train, guarded=True, p2p_timeout=30.0):
        assert isinstance(error, PipelineMismatchError), error
        unchanged = 2 if boundary == 0 else 0
        assert error.field == "the shapes of messages"
        assert error.values[unchanged] == "in step 2 those of its last step"
        assert all("(5, 2, 4)" in shapes for rank, shapes in error.values.items() if rank != unchanged)
    assert time.monotonic() - begun < 15
