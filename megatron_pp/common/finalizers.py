"""Finalizers that run in the process that made them, and the end of the package's threads.

A forked child that ends by ``sys.exit`` runs the finalizers of its parent, too. It has none of the threads that they
wait for, and the processes and connections that they end are the parent's.

Threads end before the interpreter does. A daemon thread that returns from one of torch's C++ calls while the
interpreter finalises is ended by ``pthread_exit`` (CPython up to 3.13). That unwinds the destructor in which pybind11
takes the interpreter lock back, so the process aborts: "terminate called without an active exception".
"""

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize_here(owner: Any, call: Callable[..., object], *arguments: Any) -> weakref.finalize:
    """``weakref.finalize`` that has no effect in processes that are forked from this one."""
    return weakref.finalize(owner, call_in, os.getpid(), call, *arguments)


def call_at_exit(method: Callable[..., object]) -> None:
    """Call the bound ``method`` when the program ends, unless its object is gone by then. Methods that are registered
    last are called first. Processes that are forked from this one do not call it."""
    finalize_here(method.__self__, call_if_alive, weakref.WeakMethod(method))  # type: ignore[attr-defined]


def call_in(process: int, call: Callable[..., object], *arguments: Any) -> None:
    """Call ``call`` if this process has the number ``process``."""
    if os.getpid() == process:
        call(*arguments)


def call_if_alive(method: weakref.WeakMethod[Callable[..., object]], *arguments: object) -> None:
    alive = method()
    if alive is not None:
        alive(*arguments)
