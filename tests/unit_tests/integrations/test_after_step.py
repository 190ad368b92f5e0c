"""What stands for Megatron's optimizers and the program's last word under install(), and that it goes again."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_pp.faults import between_steps
from megatron_pp.integrations.megatron import removal
from megatron_pp.integrations.megatron.steps import after_step


class Optimizer:
    def step(self, number: int) -> int:
        return 2 * number


class Chained(Optimizer):
    def step(self, number: int) -> int:
        """Step all optimizers."""
        if number < 0:
            raise ValueError("no such number")
        return super().step(number) + 1


class Late(Optimizer):
    pass


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("megatron.core.optimizer.optimizer")
    made.MegatronOptimizer = Optimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_watched_optimizer_steps_return_their_results_and_are_restored(module: ModuleType) -> None:
    before, hook = vars(Chained)["step"], sys.excepthook
    for _ in range(2):
        after_step.watch_what_follows()
    assert isinstance(sys.excepthook, after_step.WatchedEnd)
    assert sys.excepthook.theirs is hook
    assert Chained().step(3) == 7
    assert Late().step(3) == 6
    assert Chained.step.__doc__ == before.__doc__
    assert "step" not in vars(Late)
    removal.leave_what_follows()
    assert vars(Chained)["step"] is before
    assert sys.excepthook is hook


def test_an_exception_is_raised_as_the_guard_says(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    after_step.watch_what_follows()
    try:
        with pytest.raises(ValueError, match="no such number"):
            Chained().step(-1)
        monkeypatch.setattr(between_steps, "cause_between_steps", lambda error: RuntimeError("rank 1 raised"))
        with pytest.raises(RuntimeError, match="rank 1 raised") as caught:
            Chained().step(-1)
        assert isinstance(caught.value.__cause__, ValueError)
    finally:
        removal.leave_what_follows()


def test_an_excepthook_set_later_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", theirs := SimpleNamespace())
    removal.leave_what_follows()
    assert sys.excepthook is theirs
