"""Ends the package's threads before the interpreter ends.

A daemon thread that returns from one of torch's C++ calls while the interpreter finalises is ended by ``pthread_exit``
(CPython up to 3.13). That unwinds the destructor in which pybind11 takes the interpreter lock back, so the process
aborts: "terminate called without an active exception".
"""

import weakref
from collections.abc import Callable

from megatron_pp.common.finalizers import finalize_here


def call_at_exit(method: Callable[..., object]) -> None:
    """Call the bound ``method`` when the program ends, unless its object is gone by then. Methods that are registered
    last are called first. Processes that are forked from this one do not call it."""
    finalize_here(method.__self__, call_if_alive, weakref.WeakMethod(method))  # type: ignore[attr-defined]


def call_if_alive(method: weakref.WeakMethod[Callable[..., object]], *arguments: object) -> None:
    alive = method()
    if alive is not None:
        alive(*arguments)
