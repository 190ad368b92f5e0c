"""A guard whose store fails or answers no more: an error for who waits, in time."""

# ruff: noqa: PT012 (what is raised comes from leaving the step, whatever its body does)

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pp.errors import PipelinePeerError, PipelineStallError
from megatron_pp.faults.causes import stall_detector
from megatron_pp.faults.position.device_events import CompletedWork
from tests.unit_tests.faults.guards import Unreachable, raised_by, wait_until_aborted


@pytest.mark.slow
def test_a_lost_store_is_an_error_for_a_waiting_rank(guard_of: Any) -> None:
    store = Unreachable()
    guard, source = guard_of(0, store)
    with (
        pytest.raises(PipelineStallError, match=r"the store has failed \(DistNetworkError: connection reset"),
        guard.step(source),
    ):
        store.gone = True
        wait_until_aborted(source)


@pytest.mark.slow
def test_an_exception_is_raised_although_the_store_is_gone(guard_of: Any) -> None:
    """And at once, not after the timeout."""
    store = Unreachable()
    guard, source = guard_of(0, store, timeout=600.0)

    def step(rank: int) -> None:
        with guard.step(source):
            store.gone = True
            raise ValueError("mine")

    (raised,) = raised_by(1, step, 60.0)
    assert isinstance(raised, ValueError)
    assert str(raised) == "mine"


@pytest.mark.slow
def test_a_store_whose_process_ended_before_the_first_step(guard_of: Any) -> None:
    """The store's own timeout, which a new connection would wait for, is far longer."""
    code = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
    code += "; print(s.port, flush=True); sys.stdin.read()"
    host = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    port, timeout = int(host.stdout.readline()), timedelta(minutes=30)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    host.communicate("")
    begun = time.monotonic()

    def step(rank: int) -> None:
        guard, source = guard_of(rank, store, timeout=600.0)
        with guard.step(source, "plan", dict):
            pytest.fail("nobody else is there")

    (raised,) = raised_by(1, step)
    assert isinstance(raised, PipelineStallError)
    assert "the store has failed (ConnectionRefusedError" in str(raised)
    assert time.monotonic() - begun < 15.0


HOST = """
import os, time, torch.distributed as dist
from tests.unit_tests.faults.guards import new_guard
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
guard, source = new_guard(0, store)
try:
    with guard.step(source, "plan", dict):
        time.sleep(0.3)
        raise ValueError("mine")
except ValueError:
    os._exit(3)
"""


def test_the_cause_outlives_the_process_that_holds_the_store(guard_of: Any) -> None:
    """The process with the store ends as soon as it has raised. The others read the store four times a second."""
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
    guard, source = guard_of(1, store)
    with pytest.raises(PipelinePeerError, match=r"ValueError.*mine"), guard.step(source, "plan", dict):
        wait_until_aborted(source)
    assert host.wait(10.0) == 3


class Blocking(Unreachable):
    """Calls neither return nor fail while ``cut`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = threading.Event()

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)

        def blocked(*args: Any) -> Any:
            while self.cut.is_set():
                time.sleep(0.05)
            return call(*args)

        return blocked


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [False, True])
def test_a_store_that_blocks_does_not_block_the_verdict(
    guard_of: Any, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network to the store is cut, before the first step or in it; before it the verdict does not take
    p2p_timeout."""
    monkeypatch.setattr(stall_detector, "_CONNECTING", 1.5)
    store = Blocking()
    guard, source = guard_of(0, store, timeout=600.0 if is_first else 1.5)
    if is_first:
        store.cut.set()
    with pytest.raises(PipelineStallError, match="the store has not answered"), guard.step(source):
        if not is_first:
            time.sleep(0.5)
        store.cut.set()
        wait_until_aborted(source)
    store.cut.clear()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False], ids=["not published", "published"])
def test_an_unpublished_failure_aborts_other_groups_before_they_reduce(guard_of: Any, cut: bool) -> None:
    """Where hosts run ahead, ranks that find no failure go on to an update after this rank has aborted: its other
    groups are aborted first, so that none gets what an aborted transfer left."""
    store, aborted = Blocking(), []
    aborts = {"abort": lambda: aborted.append("pipeline"), "escalate": lambda: aborted.append("other groups")}
    guard, source = guard_of(0, store, timeout=600.0, completed=CompletedWork(), **aborts)
    try:
        with pytest.raises(ValueError, match="mine"), guard.step(source):
            time.sleep(0.5)
            if cut:
                store.cut.set()
            raise ValueError("mine")
    finally:
        store.cut.clear()
    assert list(dict.fromkeys(aborted)) == (["other groups", "pipeline"] if cut else ["pipeline"])
