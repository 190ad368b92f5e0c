"""The thread that judges whether the pipeline has stalled, and sees to it that this rank leaves its step when it has
to."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from megatron_pp.comm.at_exit import call_at_exit
from megatron_pp.faults.heartbeat import Link

# Seconds.
_BEFORE_ESCALATION = 2.0  # that a rank is given to leave its step after its communicator was aborted
_BEFORE_SHOWING_STACK = 5.0
_BEFORE_LEFT_BEHIND = 5.0  # longer than it takes to report a failure and to abort the communicator


class Watched(Protocol):
    """What the thread calls: see ``guard.FaultGuard``."""

    rank: int

    def in_step(self) -> bool: ...

    def act(self) -> bool: ...

    def escalate(self) -> None: ...

    def show_stack(self) -> None: ...


class Watch:
    """The thread that judges. Sleeps outside steps; never talks to the store."""

    def __init__(self, guard: Watched, link: Link) -> None:
        self._guard = guard
        self._link = link
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False

    def wake(self) -> None:
        """At the start of a step."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=f"megatron_pp watch {self._guard.rank}")
            self._thread.start()
            call_at_exit(self.close)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        with self._link.lock:
            self._link.lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_BEFORE_LEFT_BEHIND)

    def _run(self) -> None:
        guard = self._guard
        link = self._link
        while not self._closed:
            if not guard.in_step():
                self._wake.clear()
                if not guard.in_step():
                    self._wake.wait()
                continue
            with link.lock:
                link.lock.wait(link.pace.poll)
            if guard.act():
                self._see_it_out()

    def _see_it_out(self) -> None:
        """The communicator is aborted: wait for this rank to leave its step, with stronger means if it does not."""
        guard = self._guard
        if self._left_within(_BEFORE_ESCALATION):
            return
        guard.escalate()
        if self._left_within(_BEFORE_SHOWING_STACK):
            return
        guard.show_stack()
        while not self._closed and guard.in_step():
            time.sleep(0.1)

    def _left_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._guard.in_step() and not self._closed:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        return True
