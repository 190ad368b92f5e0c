"""Stores of weight gradients with one fault each: every one is caught, by gradients, by hooks, or by an error of the
store; the store as it is does no harm.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Any

import pytest
import torch

from megatron_pp.errors import WeightGradError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.runtime.executor import PlanExecutor
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run
from megatron_pp.weight_grad import WeightGradStore, split_weight_grad
from megatron_pp.weight_grad.deferred import Deferred, Waiting
from megatron_pp.weight_grad.linear import DeferredLinear
from tests.harness.plan_text import edited, refusal
from tests.harness.race_support import exact_data, run_plan

SIZE, MICROBATCHES = 2, 5
NAMES = ["zb_h2", "zb_v", "interleaved_zb"]  # in which several microbatches wait at a time


class WrongMicrobatch(WeightGradStore):
    """W works off another microbatch's queue where one waits."""

    def run(self, chunk: int, mb: int) -> None:
        others = [key for key in self.waiting() if key[0] == chunk and key[1] != mb]
        if others and (chunk, mb) in self._queues:
            mine, other = self._queues[(chunk, mb)], self._queues[others[-1]]
            self._queues[(chunk, mb)], self._queues[others[-1]] = other, mine
        super().run(chunk, mb)


class WrongInput(WeightGradStore):
    """W multiplies a microbatch's output gradient with the input of the one before."""

    before: torch.Tensor | None = None

    def _work_off(self, queue: deque[Waiting]) -> None:
        for waiting in queue:
            if isinstance(waiting.deferred, DeferredLinear):
                mine = waiting.deferred.layer_input
                if self.before is not None:
                    waiting.deferred.layer_input = self.before
                self.before = mine
        super()._work_off(queue)


class Twice(WeightGradStore):
    """W computes each weight gradient twice."""

    def _work_off(self, queue: deque[Waiting]) -> None:
        queue.extend(list(queue))
        super()._work_off(queue)


class Dropped(WeightGradStore):
    """One W does nothing."""

    def run(self, chunk: int, mb: int) -> None:
        if mb == 1:
            self._queues[(chunk, mb)].clear()
        super().run(chunk, mb)


class Skipped(WeightGradStore):
    """One W is not run at all: what it was to run is left in the store."""

    def run(self, chunk: int, mb: int) -> None:
        if mb != 1:
            super().run(chunk, mb)


class AtOnceAndLater(WeightGradStore):
    """A split B computes the weight gradients, and leaves them for W too."""

    def leave(self, deferred: Deferred) -> None:
        super().leave(deferred)
        assert self._current is not None
        with torch.no_grad():
            super()._work_off(deque([self._queues[self._current.key][-1]]))


class LastInFirstOut(WeightGradStore):
    """W works off its queue from the wrong end, and forgets what B began with."""

    def _work_off(self, queue: deque[Waiting]) -> None:
        super()._work_off(deque(reversed(list(queue)[1:])))


class HooksEveryTime(WeightGradStore):
    """Accumulation hooks fire with every gradient."""

    def begin_step(self, last: Any) -> None:
        super().begin_step(last)
        self._complete.update(last)


class HooksNever(WeightGradStore):
    """No microbatch counts as the last."""

    def begin_step(self, last: Any) -> None:
        super().begin_step({})


MUTANTS = (
    WrongMicrobatch,
    WrongInput,
    Twice,
    Dropped,
    Skipped,
    AtOnceAndLater,
    LastInFirstOut,
    HooksEveryTime,
    HooksNever,
)


class _Hooks:
    """Accumulation hooks of one rank's parameters: how often each fired, and whether its gradient was complete."""

    def __init__(self, chunks: list[Any]) -> None:
        self.parameters = [p for chunk in chunks for p in chunk.parameters()]
        self.fired: Counter[torch.Tensor] = Counter()
        self.seen: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.fired[parameter] += 1
        self.seen[parameter] = parameter.grad.clone()

    def faults(self) -> list[str]:
        once = all(self.fired[p] == 1 for p in self.parameters)
        whole = all(p in self.seen and torch.equal(self.seen[p], p.grad) for p in self.parameters)  # type: ignore[arg-type]
        return [text for text, right in (("hooks: not once", once), ("hooks: not complete", whole)) if not right]


def harm(store_type: type[WeightGradStore], name: str) -> str:
    """What goes wrong in a step, in words; empty where gradients and hooks are right."""
    chunks, data = SCHEDULES[name].chunks or 2, ToyData(MICROBATCHES)
    hooks: list[_Hooks] = []

    def prepare(stages: list[Any]) -> None:
        split_weight_grad(stages).__class__ = store_type
        hooks.append(_Hooks(stages))

    try:
        result = run_in_threads(SIZE, chunks, data, prepare=prepare, pipeline_schedule=name, overlap_p2p_comm=True)
    except WeightGradError as error:
        return f"WeightGradError: {error}"
    off = result.difference(reference_run(SIZE * chunks, data))
    found = [fault for rank in hooks for fault in rank.faults()] + ([f"gradients off by {off}"] if off else [])
    return "; ".join(found)


@pytest.mark.parametrize("name", NAMES)
def test_the_store_as_it_is_does_no_harm(name: str) -> None:
    assert harm(WeightGradStore, name) == ""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(mutant: type[WeightGradStore], name: str) -> None:
    assert harm(mutant, name) != ""


def test_what_is_left_in_the_store_is_reported() -> None:
    assert harm(Skipped, "zb_h2") == (
        "WeightGradError: weight gradients of (chunk, microbatch) [(0, 1)] were left behind: "
        "each B that is split needs its W"
    )


class _NotEmptied(Skipped):
    """What is left behind is neither reported nor dropped."""

    def end_step(self) -> None:
        self.armed = False


def test_a_store_that_is_not_emptied_is_reported_by_the_next_step() -> None:
    model = torch.nn.Linear(2, 2)
    store = split_weight_grad(model)
    store.__class__ = _NotEmptied
    store.abort_step = lambda: None  # type: ignore[method-assign]
    _one_step(model, store)
    with pytest.raises(WeightGradError, match="backward of chunk 0, microbatch 1 ran twice"):
        _one_step(model, store)


def _one_step(model: torch.nn.Module, store: WeightGradStore) -> None:
    with store.step({0: 2}):
        for mb in (1, 2):
            loss = model(torch.ones(1, 2)).sum()
            with store.backward(0, mb):
                loss.backward()
            store.run(0, mb)


def test_a_w_before_its_b_is_refused_by_verify_and_by_the_store() -> None:
    early = edited(build_plan(PlanSpec("zb_h1", 2, 1, 4)), 0, "move W0.0 before I0.0")
    assert re.search(r"rank 0: W0\.0 .*: it comes before its backward left the weight gradients", refusal(early))

    def with_real_store(*args: Any, weights: Any, **more: Any) -> PlanExecutor:
        return PlanExecutor(*args, weights=WeightGradStore(), **more)

    with pytest.raises(WeightGradError, match="microbatch 0 wait: its backward has not run"):
        run_plan(early, exact_data(4), MemoryNetwork(2), executor=with_real_store)
