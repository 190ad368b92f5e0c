"""Guards of hosts that run ahead are asked before an optimizer changes parameters (``FaultGuard.before_update``)."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_pp.common.object_table import ObjectTable

# Of this process; the guards are the keys. Torch has one list of hooks for all optimizers, and while one of them steps
# no other thread may change it. So there is one hook, which stays.
_ASKED: ObjectTable[None] = ObjectTable()


class Guard(Protocol):
    """What is seen here of a ``FaultGuard``."""

    def before_update(self) -> None: ...


def ask_before_updates(guard: Guard) -> None:
    """From now on, until ``ask_no_more``."""
    _hook_optimizers()
    _ASKED[guard] = None


def ask_no_more(guard: Guard) -> None:
    """Also where it was not asked."""
    _ASKED.discard(guard)


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_update)


def _before_update(*_step: object) -> None:
    guard: Guard
    for guard, _ in _ASKED.items():
        guard.before_update()
