"""The thread that detects stalls, and makes this rank leave its step when it has to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp.common.finalizers import call_at_exit
from megatron_pp.faults.heartbeat import Heartbeat
from megatron_pp.faults.position.tracker import Tracker

_JOIN = 5.0  # seconds: longer than it takes to report a failure and to abort the communicator


@dataclass(eq=False)
class Watchdog:
    """Polls ``act``, which acts on a failure and returns whether there is one; after that ``await_exit`` returns when
    this rank has left its step. Sleeps outside steps; never calls the store, nor the device."""

    tracker: Tracker
    heartbeat: Heartbeat
    act: Callable[[], bool]
    await_exit: Callable[[Watchdog], None]

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.awake = threading.Event()
        self.closed = False

    def wake(self) -> None:
        """At the start of a step, where it is not ``awake``."""
        if self._thread is None:
            name = f"megatron_pp watchdog {self.tracker.rank}"
            self._thread = threading.Thread(target=self._run, daemon=True, name=name)
            self._thread.start()
            call_at_exit(self.close)
        self.awake.set()

    def close(self, wait: bool = True) -> None:
        self.closed = True
        self.awake.set()
        if self.tracker.completed is not None:
            self.tracker.completed.close(wait)
        with self.heartbeat.lock:
            self.heartbeat.lock.notify_all()
        if wait and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _run(self) -> None:
        lock = self.heartbeat.lock
        while not self.closed:
            if not self.is_active():
                self.awake.clear()
                if not self.is_active():
                    self.awake.wait()
                continue
            with lock:
                lock.wait(self.heartbeat.pace.poll)
            if self.act():
                self.await_exit(self)

    def is_active(self) -> bool:
        """Whether the host or the device is in what is watched."""
        if self.tracker.completed is not None:
            self.tracker.completed.ask()
        return self.tracker.where() is not None
