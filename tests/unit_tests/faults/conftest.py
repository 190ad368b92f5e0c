"""What tests of the guard share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_pp.faults.store.processes import process_of
from megatron_pp.faults.store.records import Process
from tests.unit_tests.faults.guards import new_guard


@pytest.fixture
def gone() -> Process:
    """A process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    process = process_of(child.pid)
    child.communicate()
    return process


@pytest.fixture
def guard_of() -> Iterator[Callable[..., tuple[Any, Any]]]:
    """``new_guard``, whose guards are closed after the test."""
    made: list[Any] = []

    def make(*args: Any, **more: Any) -> tuple[Any, Any]:
        made.append(new_guard(*args, **more))
        return made[-1]

    yield make
    for guard, _ in made:
        guard.close()


@pytest.fixture
def nccl_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the NCCL variables with which the guard logs no warning."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
