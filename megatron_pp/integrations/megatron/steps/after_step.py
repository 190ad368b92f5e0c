"""Watches what Megatron's training loop does between two steps: other ranks learn of an exception there by its name.

The optimizer's collectives, and those of the loop around it, run outside of the schedules. Without this module, an
exception in them ends the program of one rank, and the others get gloo's error of a closed connection, or hang on NCCL.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import MethodType, TracebackType
from typing import Any


class WatchedStep:
    """Replaces the method ``step`` of a class of Megatron's optimizers. It passes an exception to the fault guard, and
    raises the error that the guard returns."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        functools.update_wrapper(self, theirs)
        self.theirs = theirs

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else MethodType(self, optimizer)

    def __call__(self, *args: Any, **more: Any) -> Any:
        try:
            return self.theirs(*args, **more)
        except BaseException as error:
            found = _cause_of(error)
            if found is error:
                raise
            raise found from error


class WatchedEnd:
    """Replaces ``sys.excepthook``: shows the cause of the exception that ends the program, and tells other ranks."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self.theirs = theirs

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found = _cause_of(error)
        if found is not error:
            found.__cause__, kind, trace = error, type(found), found.__traceback__
        self.theirs(kind, found, trace)


def _cause_of(error: BaseException) -> BaseException:
    from megatron_pp.faults.between_steps import cause_between_steps

    return cause_between_steps(error)


def watch_what_follows() -> None:
    """Watch all optimizers, also those made before. A second call adds classes that were loaded since."""
    for kind in optimizers():
        theirs = vars(kind).get("step")
        if theirs is not None and not isinstance(theirs, WatchedStep):
            kind.step = WatchedStep(theirs)  # type: ignore[attr-defined]
    if not isinstance(sys.excepthook, WatchedEnd):
        sys.excepthook = WatchedEnd(sys.excepthook)


def optimizers() -> Iterator[type]:
    """Megatron's class and those derived from it, as far as they are loaded."""
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    first = getattr(module, "MegatronOptimizer", None)
    waiting: list[type] = [] if first is None else [first]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()
