"""The thread that talks to the store: tells where this rank is, and brings what the others tell.

It is a thread of its own, apart from the one that judges, because a call on the store can block for as long as the
network is cut.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_pp.comm.at_exit import call_at_exit
from megatron_pp.faults.peers import View
from megatron_pp.faults.records import DONE, Entry, Failure, Progress, RecordError
from megatron_pp.faults.store import Board

Clock = Callable[[], float]

_HURRY = 0.02
_AFTER_ERROR = 1.0  # torch's client writes a page of warnings for each call on a connection that is gone


@dataclass(frozen=True)
class Pace:
    """Seconds between what the threads of a guard do.

    poll   between looks for a failure
    beat   between signs of life
    quiet  without moving until this rank begins to read where the others are
    """

    poll: float
    beat: float
    quiet: float

    @classmethod
    def of(cls, timeout: float, world_size: int) -> Pace:
        """Quick for small jobs and short timeouts; slower where thousands of ranks ask one store."""
        crowd = max(1.0, world_size / 500)
        return cls(
            poll=min(0.25 * crowd, timeout / 8), beat=min(0.5 * crowd, timeout / 8), quiet=min(1.0 * crowd, timeout / 8)
        )


class Link:
    """Owns the board; nobody else talks to it. ``lock`` guards ``view`` and everything that is handed over.

    whereabouts   called from the link's thread: this rank's progress now, None outside a step
    at_rest       the same: what it has done, outside a step
    asked_from    set by others: where the other ranks are is read, although this one moves, until they have all come
                  to this step
    """

    def __init__(
        self,
        board: Board,
        pace: Pace,
        whereabouts: Callable[[], Progress | None],
        at_rest: Callable[[], Progress],
        clock: Clock = time.monotonic,
    ) -> None:
        self.board = board
        self.pace = pace
        self.view = View()
        self.lock = threading.Condition()
        self.asked_from = 0
        self.settled_to = 0
        self._whereabouts = whereabouts
        self._at_rest = at_rest
        self._clock = clock
        self._outbox: deque[Entry | Failure] = deque()
        self._thread: threading.Thread | None = None
        self._parked = False
        self._hurry = False
        self._entering = False
        self._closed = False
        self._beat = 0
        self._told: Progress | None = None
        self._told_at = 0.0

    # -- from other threads --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Called at the start of a step: costs an attribute lookup while the thread is awake."""
        if self._parked or self._thread is None:
            with self.lock:
                self._start()
                self.lock.notify_all()

    def tell(self, record: Entry | Failure, seconds: float) -> bool:
        """Hand over a record; whether it was in the store within ``seconds``, and ``view`` knows what failed before a
        failure."""
        with self.lock:
            self._outbox.append(record)
            self._entering = isinstance(record, Entry)
            self._hurry = True
            self._start()
            self.lock.notify_all()
            return self.lock.wait_for(lambda: self._closed or record not in self._outbox, seconds)

    def hurry(self, on: bool) -> None:
        """Look at everything often: somebody waits for it."""
        with self.lock:
            self._hurry = on
            self._entering = self._entering and on
            self.lock.notify_all()

    def forget(self) -> None:
        """Begin a new epoch."""
        with self.lock:
            self.view = View()
            self._outbox.clear()
            self._told = None
            self.asked_from = self.settled_to = 0
            self.board.renew()

    def close(self, seconds: float = 2.0) -> None:
        """End the thread; one that is stuck in a call on the store stays until that ends, or the process does."""
        with self.lock:
            self._closed = True
            self.lock.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, daemon=True, name=f"megatron_pp link {self.board.rank}")
            self._thread.start()
            call_at_exit(self.close)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            here = self._whereabouts()
            worked = self._exchange(here)
            with self.lock:
                self.lock.notify_all()
                if self._closed:
                    return
                if here is None and not worked:  # nobody in a step, and nobody to talk to
                    self._outbox.clear()
                    self._told = None
                if here is None and not self._outbox:
                    self._parked = True
                    self.lock.wait_for(lambda: self._closed or self._outbox or self._whereabouts() is not None)
                    self._parked = False
                else:
                    self.lock.wait(
                        _AFTER_ERROR if not worked else min(self.pace.poll, _HURRY) if self._hurry else self.pace.poll
                    )

    def _exchange(self, here: Progress | None) -> bool:
        """One round with the store; whether it answered."""
        with self.lock:
            self.view.asked_at = self._clock()
        try:
            self._send_outbox()
            if here is not None or self._told is not None:
                self._tell_progress(here)
            if here is not None:
                self._look(here)
            error = None
        except RecordError as problem:
            error = f"unreadable record: {problem}"
        except Exception as problem:  # whatever the store's client raises when its server is gone
            error = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
        with self.lock:
            self.view.asked_at = None
            if error is None:
                self.view.broken_since, self.view.broken = None, ""
            else:
                self.view.broken_since = self.view.broken_since or self._clock()
                self.view.broken = error
        return error is None

    def _send_outbox(self) -> None:
        while self._outbox:
            record = self._outbox[0]
            if isinstance(record, Entry):
                self.board.publish(record)
                self._take_out(record)
                continue
            self.board.announce(record)
            try:
                known = self.board.failure()  # with what others told since the last look, and before this
                with self.lock:
                    self.view.failure = known or self.view.failure
            finally:
                self._take_out(record)

    def _take_out(self, record: Entry | Failure) -> None:
        with self.lock:
            if self._outbox and self._outbox[0] is record:
                self._outbox.popleft()
            self.lock.notify_all()

    def _tell_progress(self, here: Progress | None) -> None:
        """A sign of life when one is due, and at once where the rank's state changed."""
        now = self._clock()
        told = self._told
        if here is None:
            here = self._at_rest()
        changed = told is None or (told.step, told.state) != (here.step, here.state)
        if not changed and now - self._told_at < self.pace.beat:
            return
        self._beat += 1
        self.board.publish(replace(here, beat=self._beat))
        self._told_at = now
        self._told = None if here.state == DONE else here

    def _look(self, here: Progress) -> None:
        failure = self.board.failure()
        reading = here.idle >= self.pace.quiet or self._hurry or self.asked_from > self.settled_to
        progress = self.board.progress() if reading else None
        entries = self.board.entries() if self._entering else None
        with self.lock:
            view = self.view
            view.failure = view.failure or failure
            if progress is None:
                view.stop_reading()
            else:
                progress.pop(self.board.rank, None)
                view.note_progress(progress, self._clock())
            if entries is not None:
                view.entries = entries
