"""Observers of the instructions of a step. ``step_observer.py`` has those that take part in its phases."""

import math
from typing import Any, Protocol, runtime_checkable

import torch

from megatron_pp.plan.ir.instruction import Instruction


class Observer(Protocol):
    """An object whose methods are called before and after each instruction of a step."""

    def begin(self, at: Instruction) -> None: ...

    def end(self, at: Instruction) -> None: ...


@runtime_checkable
class Recording(Observer, Protocol):
    """An observer that takes part before the first instruction and after the last one, with the channels of all ranks
    prepared."""

    def start(self) -> None: ...

    def finish(self) -> None: ...


def nested(*candidates: Observer | None) -> Observer | None:
    """One observer for all that are not None; None if all are."""
    found = [one for one in candidates if one is not None]
    if len(found) < 2:
        return found[0] if found else None
    from megatron_pp.tracing.nested_observers import NestedObservers

    return NestedObservers(found)


def message_bytes(shapes: Any, dtype: torch.dtype | None) -> float:
    """Bytes of a message of ``shapes`` (one, or a list of them) in ``dtype``; 0 if they are not known."""
    if shapes is None or dtype is None:
        return 0.0
    if all(isinstance(n, int) for n in shapes):
        return float(math.prod(shapes)) * dtype.itemsize
    return sum(message_bytes(shape, dtype) for shape in shapes)
