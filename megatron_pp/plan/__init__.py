"""Schedules as data: built, verified and simulated without torch."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_pp.plan.builder import build_plan
    from megatron_pp.plan.builder import build_plan as build
    from megatron_pp.plan.simulate.simulator import simulate
    from megatron_pp.plan.verify.verifier import verify

_EXPORTS = {
    "build": ("builder", "build_plan"),
    "build_plan": ("builder", "build_plan"),
    "simulate": ("simulate.simulator", "simulate"),
    "verify": ("verify.verifier", "verify"),
}

__all__ = ["build", "build_plan", "simulate", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, function = _EXPORTS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)


class _Plan(ModuleType):
    """``simulate`` and ``verify`` are functions here, and the rooms of these names are imported by their full paths."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _EXPORTS:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Plan
