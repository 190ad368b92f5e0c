"""Waiting for a gloo transfer so that another thread can end the wait.

gloo does not wake everybody when a connection ends (see ``abort.py``): not who waits for a transfer that is half on the
wire, of whatever direction, and not who waits for a send, of whatever size, that was written to a connection which the
other side had just reset: ``Pair::write`` (gloo/transport/tcp/pair.cc) takes that for "try again later" and queues the
send, and ``Pair::signalException`` passes over what is queued there. It offers no other way to wake them. So these
waits are done by a helper thread, and the waiting thread waits for the helper, or for ``interrupt``. A helper that is
stuck ends with the process, or when the process group's own timeout is over. The hand-over costs some ten microseconds;
receives of messages that go into the socket's buffer as a whole can not get stuck, and are waited for directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
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
        self._why: str | None = None
        self._tasks: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._helper: threading.Thread | None = None

    def run(self, task: Callable[[], Any]) -> None:
        """Run ``task`` in the helper thread; raises what it raises, or InterruptedTransferError."""
        if self._helper is None and self._why is None:
            self._helper = threading.Thread(
                target=_help, args=(self._tasks, self._outcomes), daemon=True, name="megatron_pp transfer wait"
            )
            self._helper.start()
        if self._why is None:
            self._tasks.put(task)
            error = self._outcomes.get()
            if error is not None:
                raise error
            if self._why is None:
                return
        raise InterruptedTransferError(str(self._why))

    @property
    def interrupted(self) -> bool:
        """Whether ``interrupt`` was called."""
        return self._why is not None

    def interrupt(self, why: str) -> None:
        """End the wait that is going on, and every later one. The helper thread ends as soon as it is not inside a
        wait."""
        self._why = self._why or why
        self._outcomes.put(None)
        self._tasks.put(None)

    def close(self) -> None:
        """End the helper thread; call when no wait is going on."""
        self.interrupt("the communicator was closed")
        if self._helper is not None:
            self._helper.join(_PATIENCE)


def _help(tasks: SimpleQueue[Callable[[], Any] | None], outcomes: SimpleQueue[BaseException | None]) -> None:
    while (task := tasks.get()) is not None:
        outcome: BaseException | None = None
        try:
            task()
        except BaseException as error:  # handed to the thread that waits
            outcome = error
        del task  # it holds the work, and the work its tensor
        outcomes.put(outcome)
        outcome = None


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
