"""A guard whose store fails or answers no more: an error for who waits, in time."""

# ruff: noqa: PT012 (what is raised comes from leaving the step, whatever its body does)

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from megatron_pp.errors import (
    PipelineStallError,
)
from tests.unit_tests.faults.guards import Ranks, Unreachable, guard_of, wait_until_aborted


@pytest.mark.slow
def test_a_store_that_is_gone_is_an_error_for_who_waits() -> None:
    store = Unreachable()
    guard, source = guard_of(0, store)
    with (
        pytest.raises(PipelineStallError, match=r"the store has failed \(DistNetworkError: connection reset"),
        guard.step(source),
    ):
        store.gone = True
        wait_until_aborted(source)
    guard.close()


@pytest.mark.slow
def test_an_exception_is_raised_although_the_store_is_gone() -> None:
    """And at once, not after the timeout."""
    store = Unreachable()
    guard, source = guard_of(0, store, timeout=600.0)

    def step(rank: int) -> None:
        with guard.step(source):
            store.gone = True
            raise ValueError("mine")

    (raised,) = Ranks(1, step).run(seconds=60.0).values()
    assert isinstance(raised, ValueError)
    assert str(raised) == "mine"
    guard.close()


@pytest.mark.slow
def test_a_store_that_blocks_does_not_block_the_verdict() -> None:
    """The network to the store is cut: calls neither return nor fail."""
    cut = threading.Event()

    class Blocking(Unreachable):
        def __getattr__(self, name: str) -> Any:
            call = super().__getattr__(name)

            def blocked(*args: Any) -> Any:
                while cut.is_set():
                    time.sleep(0.05)
                return call(*args)

            return blocked

    guard, source = guard_of(0, Blocking(), timeout=1.5)
    with pytest.raises(PipelineStallError, match="the store has not answered"), guard.step(source):
        cut.set()
        wait_until_aborted(source)
    cut.clear()
    guard.close()
