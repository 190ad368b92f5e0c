"""Joins several observers of a step into one observer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pp.plan.ir.instruction import Instruction


@dataclass
class NestedObservers:
    """An observer that calls ``observers``. Later observers begin after earlier ones, and end before them."""

    observers: Sequence[Any]  # as ``tracing.observers.Observer``

    def begin(self, at: Instruction) -> None:
        for one in self.observers:
            one.begin(at)

    def end(self, at: Instruction) -> None:
        for one in reversed(self.observers):
            one.end(at)
