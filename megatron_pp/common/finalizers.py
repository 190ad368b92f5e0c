"""Finalizers that run in the process that made them.

A forked child that ends by ``sys.exit`` runs the finalizers of its parent, too. It has none of the threads that they
wait for, and the processes and connections that they end are the parent's.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize_here(owner: Any, call: Callable[..., object], *arguments: Any) -> weakref.finalize:
    """``weakref.finalize``, without effect in processes that are forked from this one."""
    return weakref.finalize(owner, call_in, os.getpid(), call, *arguments)


def call_in(process: int, call: Callable[..., object], *arguments: Any) -> None:
    """Call it where this is the process with that number."""
    if os.getpid() == process:
        call(*arguments)
