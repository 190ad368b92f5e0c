"""Fault guards with one fault each. Some query the device wrongly, which only the rules on threads show. Others are
wrong before an update or an abort, which only updates from undelivered data show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_pp.faults.failing import Failing
from megatron_pp.faults.guard import FaultGuard
from megatron_pp.faults.heartbeat import Heartbeat
from megatron_pp.faults.position.device_events import CompletedWork, EventQueries
from megatron_pp.faults.position.tracker import Outside
from megatron_pp.faults.store.records import Progress


class OnDeviceZero(EventQueries):
    """The guard's thread does not choose the device (torchcomms#777)."""

    def begin(self) -> None:
        self._device = None
        super().begin()


class WithInterpreterLock(EventQueries):
    """Queries by torch's own ``Event.query``, which keeps the interpreter lock."""

    def is_over(self, event: Any) -> bool:
        return bool(event.query())


class InWatchdog(CompletedWork):
    """The thread that aborts queries the device itself."""

    begun = False

    def ask(self) -> None:
        if not self.begun:
            self.begun = True
            self.queries.begin()
        self.poll()


class ReportsMemory(Heartbeat):
    """Queries the device's free memory with each heartbeat."""

    def _publish_progress(self, here: Progress | None) -> None:
        torch.cuda.mem_get_info()
        super()._publish_progress(here)


def _nothing(guard: FaultGuard) -> None:
    """Lets hosts continue to the optimizer without any check."""


def _device_alone(guard: FaultGuard) -> None:
    """Does not check for failures of other ranks."""
    if guard.completed is None or threading.get_ident() != guard.caller:
        return
    with guard.step(Outside(), phase="the wait for transfers", after=guard.tracker.after):
        guard.completed.synchronize()


def _look_alone(guard: FaultGuard) -> None:
    """Does not wait for the device."""
    heartbeat = guard.heartbeat
    if threading.get_ident() != guard.caller:
        return
    with guard.step(Outside(), phase="a look at failures", after=guard.tracker.after):
        with heartbeat.lock:
            heartbeat.lock.wait_for(lambda: guard.failure is not None or heartbeat.is_fresh())
            known = heartbeat.peers.failure
        if known is not None:
            guard.failing.conclude(known, False)


def _at_once(failing: Failing) -> None:
    """Aborts without a lease after the failure's publication."""
    failing.guard.abort()


def _other_groups_too(failing: Failing) -> None:
    failing.guard.abort()
    assert failing.escalate is not None
    failing.escalate()


BEFORE_UPDATES: Mapping[str, Mapping[tuple[type, str], Callable[[Any], None]]] = {
    "hosts go on": {(FaultGuard, "before_update"): _nothing},
    "no look": {(FaultGuard, "before_update"): _device_alone},
    "no wait for the device": {(FaultGuard, "before_update"): _look_alone},
    "no lease": {(Failing, "_abort"): _at_once},
    "other groups are aborted instead": {
        (FaultGuard, "before_update"): _nothing,
        (Failing, "_abort"): _other_groups_too,
    },
}
"""(class, name) of replaced methods -> their replacement."""
