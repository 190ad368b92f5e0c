"""Faults in the comparison before a call reuses the results of an earlier one: one value is left out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron_pp.config.settings import StepSettings
from megatron_pp.runtime import kept_calls


def settings_without(name: str) -> Callable[[StepSettings], tuple[Any, ...]]:
    """In place of ``kept_calls._compared``: settings that differ in the field ``name`` alone are equal."""
    theirs = kept_calls._compared
    return lambda settings: theirs(settings._replace(**{name: None}))


def others_without(name: str) -> Callable[..., tuple[Any, ...]]:
    """In place of ``kept_calls._others``: it does not see the argument ``name`` of the call."""
    theirs = kept_calls._others

    def blind(host: Any, *more: Any) -> tuple[Any, ...]:
        seen = copy.copy(host)
        seen.inputs = copy.copy(host.inputs)
        setattr(seen.inputs, name, None)
        return theirs(seen, *more)

    return blind
