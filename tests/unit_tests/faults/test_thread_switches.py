"""However the threads of a guard take turns with the rank's own, ranks that agree are never said to differ."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_pp.faults.guard import FaultGuard
from megatron_pp.faults.records import DONE, ENTERING, IN_STEP
from megatron_pp.faults.tracker import Tracker
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.threads import run_ranks

SIZE = 3
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
    source = SimpleNamespace(plan=build_plan(PlanSpec("1f1b", 2, 1, 4)), position=0)
    tracker = Tracker(0, 2)
    tracker.begin(source, entering=True)
    tracker.agreed(1)
    tracker.end()
    assert tracker.observe() is None
    tracker.begin(source, entering=True)  # by the other thread, before this one has asked for what is finished
    record = tracker.finished()
    assert (record.step, record.state, record.history) == (1, DONE, (1, 0, 1, 1))


def test_the_first_sign_of_a_step_says_that_plans_are_compared() -> None:
    """Otherwise the sign would say "in the step", which with the old entry is a mismatch."""
    tracker, source = Tracker(0, 2), SimpleNamespace(plan=build_plan(PlanSpec("1f1b", 2, 1, 2)), position=0)
    tracker.begin(source, entering=True)
    seen = [tracker.observe()]
    tracker.agreed(1)
    seen.append(tracker.observe())
    tracker.end()
    tracker.begin(source)
    seen.append(tracker.observe())
    assert [record and (record.step, record.state) for record in seen] == [(1, ENTERING), (1, IN_STEP), (2, IN_STEP)]


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
def test_ranks_that_change_plans_alike_never_differ() -> None:
    store = dist.HashStore()
    plan = build_plan(PlanSpec("1f1b", SIZE, 1, 4))

    def train(rank: int) -> int:
        guard = FaultGuard(store, "p", rank, SIZE, 20.0, lambda: None)
        source = SimpleNamespace(plan=plan, position=0)
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
