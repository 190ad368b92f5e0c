"""Calls ``FaultGuard.before_update`` of guards whose host runs ahead before an optimizer changes parameters."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_pp.common.object_table import ObjectTable

# The guards of this process are the keys. torch has one list of hooks for all optimizers, and no thread may change it
# while an optimizer steps. So there is one hook, which stays.
_ASKED: ObjectTable[None] = ObjectTable()


class Guard(Protocol):
    """The part of a ``FaultGuard`` that this module uses."""

    def before_update(self) -> None: ...


def ask_before_updates(guard: Guard) -> None:
    """Call ``guard.before_update`` before updates, until ``ask_no_more``."""
    _hook_optimizers()
    _ASKED[guard] = None


def ask_no_more(guard: Guard) -> None:
    """Undo ``ask_before_updates``. Does nothing for a guard that was not added."""
    _ASKED.discard(guard)


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_update)


def _before_update(*_step: object) -> None:
    guard: Guard
    for guard, _ in _ASKED.items():
        guard.before_update()
