"""Chooses the tests whose backwards run in a thread of autograd, as on a GPU (``testkit.autograd_thread``).

MEGATRON_PP_TEST_AUTOGRAD_THREAD is ``all``, ``none`` (the default), or a seed that draws a third of the tests.
Processes that a drawn test starts do the same.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

NAME = "MEGATRON_PP_TEST_AUTOGRAD_THREAD"
_MODULE = "testkit.autograd_thread"
_EVERY = 3  # one of this many tests is drawn
_SITE = str(Path(__file__).parent / "site")  # every interpreter loads its sitecustomize.py


def said() -> str:
    return os.environ.get(NAME) or "none"


def is_drawn(test: str) -> bool:
    """Whether the test with this node id is drawn."""
    draw = said()
    if draw in ("all", "none"):
        return draw == "all"
    return hashlib.sha256(f"{draw} {test}".encode()).digest()[0] % _EVERY == 0


@contextmanager
def backwards(in_thread: bool) -> Iterator[None]:
    """A context in which backwards run in a thread of autograd, or in the caller's, in this process and those that it
    starts."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != _SITE]
    said = {NAME: "none", "PYTHONPATH": os.pathsep.join(paths)}
    if not in_thread:
        with patch.dict(os.environ, said):
            yield
        return
    from testkit.autograd_thread import autograd_thread

    with patch.dict(os.environ, {NAME: "all", "PYTHONPATH": os.pathsep.join([_SITE, *paths])}), autograd_thread():
        yield


def follow(environment: Mapping[str, str] = os.environ) -> None:
    """Let this process follow ``environment`` from now on, whatever the process did from which it was forked."""
    wanted = environment.get(NAME) == "all"
    if not wanted and _MODULE not in sys.modules:
        return
    from torch.autograd.variable import Variable

    kind: Any = importlib.import_module(_MODULE).AutogradThreads
    engine: Any = Variable._execution_engine
    if isinstance(engine, kind):
        engine = engine.engine
    Variable._execution_engine = kind(engine) if wanted else engine


def for_processes() -> dict[str, str]:
    """The variables for a process that does not inherit this process's environment."""
    return {NAME: said()}
