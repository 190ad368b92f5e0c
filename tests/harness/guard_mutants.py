"""What a fault guard may do wrong when it asks the device: faults that only rules on threads show."""

from __future__ import annotations

from typing import Any

from megatron_pp.faults.device_events import CompletedWork, EventQueries


class OnDeviceZero(EventQueries):
    """Its thread does not choose the device (torchcomms#777)."""

    def begin(self) -> None:
        self._device = None
        super().begin()


class WithInterpreterLock(EventQueries):
    """By torch's own ``Event.query``."""

    def is_over(self, event: Any) -> bool:
        return bool(event.query())


class InWatchdog(CompletedWork):
    """The thread that aborts asks itself."""

    begun = False

    def ask(self) -> None:
        if not self.begun:
            self.begun = True
            self.queries.begin()
        self.poll()
