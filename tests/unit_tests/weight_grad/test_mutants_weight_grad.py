"""Stores of weight gradients with one fault each: every one is caught, by gradients, by hooks, or by an error of the
store; the store as it is does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pp.errors import WeightGradError
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.plan.orders import find_family
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run
from megatron_pp.weight_grad import WeightGradStore, split_weight_grad
from megatron_pp.weight_grad.deferred import Deferred, Waiting
from megatron_pp.weight_grad.linear import DeferredLinear

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


def faults_of_hooks(chunks: list[Any]) -> Callable[[], list[str]]:
    """Says of one rank's accumulation hooks whether each fired once, and with the complete gradient."""
    seen: dict[torch.Tensor, list[torch.Tensor]] = {p: [] for chunk in chunks for p in chunk.parameters()}
    for parameter in seen:
        parameter.register_post_accumulate_grad_hook(lambda p: seen[p].append(p.grad.clone()))

    def faults() -> list[str]:
        once = all(len(grads) == 1 for grads in seen.values())
        whole = all(grads and torch.equal(grads[-1], p.grad) for p, grads in seen.items())
        return ["hooks: not once"] * (not once) + ["hooks: not complete"] * (not whole)

    return faults


def harm(store_type: type[WeightGradStore], name: str, **fields: Any) -> str:
    """What goes wrong in a step, in words; empty where gradients and hooks are right."""
    chunks, data = find_family(name).chunks or 2, ToyData(MICROBATCHES)
    hooks: list[Callable[[], list[str]]] = []

    def prepare(stages: list[Any]) -> None:
        split_weight_grad(stages).__class__ = store_type
        hooks.append(faults_of_hooks(stages))

    try:
        fields = {"pipeline_schedule": name, "overlap_p2p_comm": True, **fields}
        result = run_in_threads(SIZE, chunks, data, prepare=prepare, **fields)
    except WeightGradError as error:
        return f"WeightGradError: {error}"
    off = result.difference(reference_run(SIZE * chunks, data))
    found = [fault for faults in hooks for fault in faults()] + ([f"gradients off by {off}"] if off else [])
    return "; ".join(found)


@pytest.mark.parametrize("name", [*NAMES, "1f1b", "dualpipe_v"])
def test_the_store_as_it_is_does_no_harm(name: str) -> None:
    assert harm(WeightGradStore, name) == ""


@pytest.mark.parametrize("name", ["1f1b", "dualpipe_v"])
def test_hooks_fire_once_where_backwards_run_in_pairs(name: str) -> None:
    assert harm(WeightGradStore, name, overlapped_forward_backward=in_turn) == ""


@pytest.mark.parametrize(
    "order",
    [
        "F0 F1 F2 F3 F4 I0 I1 I2 I3 I4 W4 W3 W2 W1 W0",
        "F0 F1 F2 F3 F4 I0 I1 I2 I3 W3 W2 W1 W0 B4",
        "F0 F1 F2 F3 F4 I0 B1 B2 B3 B4 W0",
    ],
)
def test_hooks_fire_with_the_last_weight_gradient_of_any_order(order: str, tmp_path: Path) -> None:
    """In a schedule file, W may run in another order than the backwards. The sums are then rounded otherwise than in
    one process, so they are compared only with the sums that the hooks have seen."""
    path = tmp_path / "order.csv"
    path.write_text("".join(",".join(f"{stage}{at}" for at in order.split()) + "\n" for stage in range(SIZE)))
    found = harm(WeightGradStore, str(path))
    assert "hooks" not in found
    assert "WeightGradError" not in found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(mutant: type[WeightGradStore], name: str) -> None:
    assert harm(mutant, name) != ""
