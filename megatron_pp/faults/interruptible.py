"""Waiting for a gloo transfer so that another thread can end the wait.

gloo does not wake the waiter of a transfer that is half on the wire when its connections are closed (see
``abort.py``), and offers no other way. So the wait for a large message is done by a helper thread, and the waiting
thread waits for the helper, or for ``interrupt``. A helper that is stuck ends with the process, or when the process
group's own timeout is over. The hand-over costs tens of microseconds; messages that go into the socket's buffer as a
whole can not get stuck half way, and are waited for directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# What a TCP socket takes without its peer reading is at least this on Linux (net.core.wmem_default 212,992 bytes, half
# of it payload).
LARGE_BYTES = 64 * 1024
_AT_ONCE = timedelta(milliseconds=1)
_PATIENCE = 1.0  # seconds for a helper to end; one that is stuck stays


class InterruptedTransferError(RuntimeError):
    """The wait was ended from another thread; the transfer is not done and never will be."""


class Interrupter:
    """Waits on behalf of one thread; ``interrupt`` may be called from any other. One per communicator."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._why: str | None = None
        self._task: Callable[[], Any] | None = None
        self._outcome: list[BaseException | None] = []
        self._helper: threading.Thread | None = None
        self._closed = False

    def run(self, task: Callable[[], Any]) -> None:
        """Run ``task`` in the helper thread; raises what it raises, or InterruptedTransferError."""
        with self._changed:
            if self._why is not None:
                raise InterruptedTransferError(self._why)
            if self._helper is None:
                self._helper = threading.Thread(target=self._help, daemon=True, name="megatron_pp transfer wait")
                self._helper.start()
            self._outcome.clear()
            self._task = task
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._outcome) or self._why is not None)
            if not self._outcome:
                raise InterruptedTransferError(str(self._why))
            error = self._outcome.pop()
        if error is not None:
            raise error

    @property
    def interrupted(self) -> bool:
        """Whether ``interrupt`` was called."""
        return self._why is not None

    def interrupt(self, why: str) -> None:
        """End the wait that is going on, and every later one. The helper thread ends as soon as it is not inside a
        wait."""
        with self._changed:
            self._why = why
            self._changed.notify_all()

    def close(self) -> None:
        """End the helper thread; call when no wait is going on."""
        self.interrupt("the communicator was closed")
        if self._helper is not None:
            self._helper.join(_PATIENCE)

    def _help(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._task is not None or self._why is not None)
                if self._task is None:
                    return
                task, self._task = self._task, None
            outcome: BaseException | None = None
            try:
                task()
            except BaseException as error:  # handed to the thread that waits
                outcome = error
            del task  # it holds the work, and the work its tensor
            with self._changed:
                self._outcome.append(outcome)
                outcome = None
                self._changed.notify_all()


class InterruptibleWork:
    """A gloo work whose ``wait`` ends when its ``Interrupter`` is interrupted."""

    __slots__ = ("_interrupter", "_work")

    def __init__(self, work: Any, interrupter: Interrupter) -> None:
        self._work = work
        self._interrupter = interrupter

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torch's: True when done. Raises RuntimeError where the transfer failed or timed out,
        InterruptedTransferError."""
        work = self._work
        if self._interrupter.interrupted:  # what is done is done; anything else fails now, and is told as what failed
            work.wait(_AT_ONCE)
        else:
            self._interrupter.run(work.wait if timeout is None else lambda: work.wait(timeout))
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
