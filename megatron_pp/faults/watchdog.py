"""The thread that detects stalls, and makes this rank leave its step when it has to."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp.comm.at_exit import call_at_exit
from megatron_pp.faults.heartbeat import Heartbeat
from megatron_pp.faults.tracker import Tracker

# Seconds.
_BEFORE_ESCALATION = 2.0  # after the communicator was aborted
_BEFORE_SHOWING_STACK = 5.0  # after that
_JOIN = 5.0  # longer than it takes to report a failure and to abort the communicator


@dataclass(eq=False)
class Watchdog:
    """Polls ``act``, which acts on a failure and returns whether there is one; while this rank does not leave its step
    after that, ``escalate`` and then ``show_stack``. Sleeps outside steps; never calls the store, nor the device."""

    tracker: Tracker
    heartbeat: Heartbeat
    act: Callable[[], bool]
    escalate: Callable[[], None] | None
    show_stack: Callable[[], None]

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False

    def wake(self) -> None:
        """At the start of a step."""
        if self._thread is None:
            name = f"megatron_pp watchdog {self.tracker.rank}"
            self._thread = threading.Thread(target=self._run, daemon=True, name=name)
            self._thread.start()
            call_at_exit(self.close)
        if not self._wake.is_set():
            self._wake.set()

    def close(self, wait: bool = True) -> None:
        self._closed = True
        self._wake.set()
        if self.tracker.completed is not None:
            self.tracker.completed.close(wait)
        with self.heartbeat.lock:
            self.heartbeat.lock.notify_all()
        if wait and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _run(self) -> None:
        lock = self.heartbeat.lock
        while not self._closed:
            if not self._is_active():
                self._wake.clear()
                if not self._is_active():
                    self._wake.wait()
                continue
            with lock:
                lock.wait(self.heartbeat.pace.poll)
            if self.act():
                self._await_exit()

    def _await_exit(self) -> None:
        """The communicator is aborted: wait for this rank to leave its step, with stronger means if it does not."""
        if self._left_within(_BEFORE_ESCALATION):
            return
        if self.escalate is not None:
            self.escalate()
        if not self._left_within(_BEFORE_SHOWING_STACK):
            self.show_stack()
            self._left_within(math.inf)

    def _left_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._is_active() and not self._closed:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        return True

    def _is_active(self) -> bool:
        """Whether the host or the device is in what is watched."""
        if self.tracker.completed is not None:
            self.tracker.completed.ask()
        return self.tracker.where() is not None
