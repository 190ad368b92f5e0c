"""Faults in the comparison before a call reuses the results of an earlier one: one value is left out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron_pp.config.step_fields import StepFields
from megatron_pp.runtime import kept_calls


def read_without(name: str) -> type[kept_calls.Read]:
    """In place of ``kept_calls.Read``: settings that differ in the field ``name`` alone are equal."""
    place = StepFields._fields.index(name)

    class Blind(kept_calls.Read):
        def __init__(self, values: Any) -> None:
            super().__init__(without(values))

        def __eq__(self, other: Any) -> bool:
            return super().__eq__(without(other))

    def without(values: Any) -> Any:
        return (*values[:place], *values[place + 1 :]) if isinstance(values, StepFields) else values

    return Blind


def others_without(name: str) -> Callable[..., tuple[Any, ...]]:
    """In place of ``kept_calls._others``: it does not see the argument ``name`` of the call."""
    theirs = kept_calls._others

    def blind(host: Any, *more: Any) -> tuple[Any, ...]:
        seen = copy.copy(host)
        seen.inputs = copy.copy(host.inputs)
        setattr(seen.inputs, name, None)
        return theirs(seen, *more)

    return blind
