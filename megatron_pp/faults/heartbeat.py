"""The thread that calls the store: it publishes this rank's position, and reads what other ranks published.

It is not the watchdog's thread, because a call on the store can block for as long as the network is cut.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_pp.common.finalizers import call_at_exit
from megatron_pp.faults.position.tracker import Tracker
from megatron_pp.faults.store.fault_store import FaultStore
from megatron_pp.faults.store.peers import Peers
from megatron_pp.faults.store.records import AFTER, DONE, Entry, Progress, RecordError

if TYPE_CHECKING:
    from megatron_pp.faults.store.failures import Failure

# Seconds.
_FAST_POLL = 0.02
_JOIN = 2.0
_LEASE = 1.0
_AFTER_ERROR = 1.0  # torch's client writes a page of warnings for each call on a connection that is gone


@dataclass(frozen=True)
class Pace:
    poll: float  # seconds between checks for a failure
    beat: float  # seconds between heartbeats
    quiet: float  # seconds without moving until this rank begins to read the positions of others
    lease: float  # seconds for which a rank may rely on having found no failure; the same on all ranks

    @classmethod
    def of(cls, timeout: float, world_size: int) -> Pace:
        """A quick pace for small jobs and short timeouts; a slower one if thousands of ranks poll one store."""
        crowd = max(1.0, world_size / 500)
        poll, beat, quiet = (min(seconds * crowd, timeout / 8) for seconds in (0.25, 0.5, 1.0))
        return cls(poll, beat, quiet, _LEASE * crowd)


class Heartbeat:
    """Owns the store: only this thread calls it, and connects to it by ``connect``, which may block. ``lock`` guards
    ``peers`` and all records that other threads pass to this one."""

    store: FaultStore  # from the first exchange on

    def __init__(self, connect: Callable[[], FaultStore], pace: Pace, tracker: Tracker) -> None:
        self.pace = pace
        self._connect = connect
        self.peers = Peers(connected=False)
        self.lock = threading.Condition()
        # Set by the guard: peers are read although this rank moves, until ``settled_to`` (the step in which all were
        # seen) has reached ``asked_from``.
        self.asked_from = 0
        self.settled_to = 0
        self._tracker = tracker
        self._outbox: deque[Entry | Failure] = deque()
        self._thread: threading.Thread | None = None
        self.parked = True  # until it is woken
        self._fast = False
        self._entering = False
        self.closed = False
        self._beat = 0
        self._published: Progress | None = None
        self._published_at = 0.0

    def wake(self) -> None:
        """Called at the start of a step if the thread is ``parked``, which it is until the first step starts it."""
        with self.lock:
            if self._thread is None and not self.closed:
                name = f"megatron_pp heartbeat {self._tracker.rank}"
                self._thread = threading.Thread(target=self._run, daemon=True, name=name)
                self._thread.start()
                call_at_exit(self.close)
            self.lock.notify_all()

    def publish(self, record: Entry | Failure, seconds: float) -> bool:
        """Give a record to this thread. Returns whether it was in the store within ``seconds``. After a failure,
        ``peers.failure`` is then the one that the store had."""
        with self.lock:
            self._outbox.append(record)
            self._entering = isinstance(record, Entry)
            self._fast = True
            self.lock.notify_all()
            return self.lock.wait_for(lambda: self.closed or record not in self._outbox, seconds)

    def poll_fast(self, on: bool) -> None:
        """Read all records often, while the main thread waits for one."""
        with self.lock:
            self._fast = on
            self._entering = self._entering and on
            self.lock.notify_all()

    def is_fresh(self) -> bool:
        """Whether the store had no failure within the last ``pace.lease`` seconds, or had one."""
        return self.peers.failure is not None or time.monotonic() - self.peers.checked_at < self.pace.lease

    def close(self, wait: bool = True) -> None:
        """End the thread. If it is stuck in a call on the store, it stays until the call or the process ends."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()
            thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN)

    def _run(self) -> None:
        self.parked = False
        while True:
            here = None if self.closed else self._tracker.observe()  # once closed, the end is published
            worked = self._exchange(here)
            if not worked and here is not None and here.state == AFTER and self.peers.failure is None:
                self._tracker.rest()  # the store's process may have ended
            with self.lock:
                self.lock.notify_all()
                if self.closed and here is None:
                    return
                if self.closed:  # closed since ``here`` was observed: publish once more, for the end
                    continue
                if here is None and not worked:  # outside a step, and no store to publish to
                    self._outbox.clear()
                    self._published = None
                if here is None and not self._outbox:
                    self.parked = True
                    self.lock.wait_for(lambda: self.closed or self._outbox or self._tracker.observe() is not None)
                    self.parked = False
                else:
                    poll = min(self.pace.poll, _FAST_POLL) if self._fast else self.pace.poll
                    self.lock.wait(poll if worked else _AFTER_ERROR)

    def _exchange(self, here: Progress | None) -> bool:
        """Exchange records with the store once. Returns whether it answered."""
        with self.lock:
            self.peers.asked_at = time.monotonic()
        try:
            if not self.peers.connected:
                self.store = self._connect()
                self.peers.connected = True
            self._send_outbox()
            if here is not None or self._published is not None:
                self._publish_progress(here)
            if here is not None:
                self._read(here)
            error = None
        except RecordError as problem:
            error = f"unreadable record: {problem}"
        except Exception as problem:  # the store's client may raise anything when its server is gone
            error = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
        with self.lock:
            self.peers.asked_at = None
            self.peers.broken_since = None if error is None else self.peers.broken_since or time.monotonic()
            self.peers.broken = error or ""
        return error is None

    def _send_outbox(self) -> None:
        while self._outbox:
            record = self._outbox[0]
            if isinstance(record, Entry):
                self.store.publish(record)
                self._remove_first()
                continue
            self.store.publish_failure(record)
            try:
                known = self.store.read_failure()  # with what others published since the last read, and before this
                with self.lock:
                    self.peers.failure = known or self.peers.failure
                self.store.note_failure_read()
            finally:
                self._remove_first()

    def _remove_first(self) -> None:
        """Only this thread removes records: the first one is the one that was sent."""
        with self.lock:
            self._outbox.popleft()
            self.lock.notify_all()

    def _publish_progress(self, here: Progress | None) -> None:
        """Publish a heartbeat when one is due, and immediately if the rank's state has changed."""
        now, last = time.monotonic(), self._published
        here = here or self._tracker.finished()
        changed = last is None or (last.step, last.state) != (here.step, here.state)
        if not changed and now - self._published_at < self.pace.beat:
            return
        self._beat += 1
        self.store.publish(replace(here, beat=self._beat))
        self._published_at = now
        self._published = None if here.state == DONE else here

    def _read(self, here: Progress) -> None:
        asked = time.monotonic()
        failure = self.store.read_failure()
        reading = here.idle >= self.pace.quiet or self._fast or self.asked_from > self.settled_to
        progress = self.store.read_all(Progress) if reading else None
        entries = self.store.read_all(Entry) if self._entering else None
        with self.lock:
            peers = self.peers
            peers.failure = peers.failure or failure
            peers.checked_at = asked
            if progress is None:
                peers.stop_reading()
            else:
                progress.pop(self.store.rank, None)
                peers.note_progress(progress, time.monotonic())
            if entries is not None:
                peers.entries = entries
        if failure is not None:
            self.store.note_failure_read()
            peers.have_read = self.store.have_read_failure()
