"""A thread for each channel of gloo, which waits for the channel's transfers ahead of the rank that needs them.

Three limits of gloo make it necessary:

- gloo does not wake every wait when a connection ends (``comm/abort.py``). A thread that is stuck in such a wait ends
  with the process, or at the process group's own timeout; the rank itself is woken by ``interrupt``. Receives of
  messages that fit into the socket's buffer cannot get stuck, and are waited for directly.
- gloo cannot report whether a transfer is done before it is waited for. A thread that has waited ahead knows, and a
  wait for what is done costs nothing.
- gloo writes to the socket in the thread that posts a send, for as long as the socket takes bytes. Measured with torch
  2.13 at 1 Gbit/s and the receive posted: 4 to 20 ms for 0.5 to 16 MB, and up to 160 ms if the same connection receives
  at the time, because of its lock. In this time the rank does not compute. So if a channel has a connection of its own,
  its thread posts the large sends, in order, each when the one before it is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from megatron_pp.errors import MegatronPPError

logger = logging.getLogger("megatron_pp")

# A TCP socket takes at least as many bytes on Linux although its peer does not read: net.core.wmem_default is 212,992
# bytes, half of it payload.
LARGE_BYTES = 64 * 1024
SMALL_SENDS = 16  # as many a rank leaves unfinished: they keep less than 1 MiB
_PREFIX = "megatron_pp "  # of the threads' names
_PATIENCE = 1.0  # seconds for all threads to end; threads that are stuck stay


class InterruptedTransferError(MegatronPPError, RuntimeError):
    """Another thread has ended the wait; the transfer is not done and never will be."""


class Transfer:
    """The work of one transfer, as torch's Work. ``is_over``: it is done, or failed."""

    __slots__ = ("_error", "_later", "_post", "_queue", "_threads", "_work", "is_over")

    def __init__(
        self,
        threads: ChannelThreads,
        queue: Queue,
        work: Any,
        post: Callable[[], Any] | None = None,
        later: list[Transfer] | None = None,
    ) -> None:
        self._threads = threads
        self._queue: Queue | None = queue
        self._later = later  # transfers of the channel that its thread has not got yet
        self._work = work
        self._post = post
        self._error: BaseException | None = None
        self.is_over = False

    def begin(self) -> None:
        """Give this transfer to the channel's thread, once, after all that were posted before it."""
        queue, later = self._queue, self._later
        if queue is None:
            return
        given = [self] if later is None else later[: later.index(self) + 1]
        if later is not None:
            del later[: len(given)]
        for transfer in given:
            transfer._queue = transfer._later = None
            queue.put(transfer)

    def follow(self) -> None:
        """Runs in the channel's thread: posts the transfer, if it is not posted yet, and waits for it."""
        work, post = self._work, self._post
        self._work = self._post = None
        try:
            (work if post is None else post()).wait(*self._threads.limit)
        except BaseException as error:  # ``wait`` raises it
            self._error = error.with_traceback(None)  # the frames of the traceback hold this transfer
        del work, post  # both hold the tensor
        self.is_over = True
        self._threads.notify(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when done. Raises what the transfer raised, RuntimeError ("Timed out") after ``timeout``,
        InterruptedTransferError."""
        if not self.is_over:
            self.begin()
            self._threads.await_end(self, timeout)
        error = self._error
        if error is not None:
            self._error = RuntimeError(str(error))  # a copy for later waits: the traceback of ``error`` holds ``self``
            try:
                raise error
            finally:
                del error
        return True

    def is_completed(self) -> bool:
        return self.is_over and self._error is None


Queue = SimpleQueue[Transfer | None]


class ChannelThreads:
    """The threads of one rank's channels. One thread at a time may wait; ``interrupt`` may be called from any.

    ``limit``: the timeout of each transfer, if it is not that of its process group."""

    def __init__(self) -> None:
        self.limit: tuple[timedelta, ...] = ()
        self._why: str | None = None
        self._queues: dict[Hashable, Queue] = {}
        self._later: dict[Hashable, list[Transfer]] = {}
        self._threads: list[threading.Thread] = []
        self._awaited: Transfer | None = None
        self._calls: SimpleQueue[None] = SimpleQueue()  # an entry wakes the waiting thread, which then looks again

    def follow(self, channel: Hashable, work: Any, ahead: bool = True) -> Transfer:
        """A posted transfer of ``channel``. Its thread waits for it immediately, or with ``ahead=False`` when the rank
        waits for it or a later one: small messages are done when they are posted, and waking a thread for each costs
        more than it saves."""
        later = self._later.setdefault(channel, [])
        transfer = Transfer(self, self._queue_of(channel), work, later=later)
        later.append(transfer)
        if ahead:
            transfer.begin()
        return transfer

    def post(self, channel: Hashable, post: Callable[[], Any]) -> Transfer:
        """A transfer that the thread of ``channel`` posts: ``post()`` returns torch's work."""
        transfer = Transfer(self, self._queue_of(channel), None, post)
        transfer.begin()
        return transfer

    def await_end(self, transfer: Transfer, timeout: timedelta | None) -> None:
        """Return when ``transfer`` is over; raises as its ``wait``."""
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        self._awaited = transfer  # before reading ``is_over``: the channel's thread writes it, then reads ``_awaited``
        try:
            while not transfer.is_over:
                if self._why is not None:
                    raise InterruptedTransferError(self._why)
                self._calls.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except Empty:
            assert timeout is not None
            raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s for a transfer") from None
        finally:
            self._awaited = None

    def notify(self, transfer: Transfer) -> None:
        """Wake the thread that waits for ``transfer``, which is over."""
        if self._awaited is transfer:
            self._calls.put(None)

    def interrupt(self, why: str) -> None:
        """End the current wait, and every later wait for a transfer that is not over. The threads end as soon as they
        are not inside a transfer."""
        self._why = self._why or why
        self._calls.put(None)
        for queue in list(self._queues.values()):
            queue.put(None)

    def forget(self) -> None:
        """Drop the transfers that no thread has got, because they hold tensors. Called by the thread that posts."""
        for later in self._later.values():
            later.clear()

    def close(self) -> None:
        """Call ``end``, and log the threads that stay."""
        stuck = self.end()
        if stuck:
            logger.warning(
                "gloo cannot end %d transfer(s) to or from a rank that failed; each holds its tensor, a thread and a "
                "connection until the process group's timeout is over: %s",
                len(stuck), "; ".join(stuck),
            )  # fmt: skip

    def end(self) -> list[str]:
        """End the threads once they have posted what they got. Not to be called during a wait. Returns the names of
        threads that stay."""
        self.interrupt("the communicator was closed")
        self.forget()
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(max(0.0, until - time.monotonic()))
        return [thread.name.removeprefix(_PREFIX) for thread in self._threads if thread.is_alive()]

    def _queue_of(self, channel: Hashable) -> Queue:
        queue = self._queues.get(channel)
        if queue is None:
            queue = self._queues[channel] = Queue()
            if self._why is None:  # after an interrupt the thread must end
                named = " ".join(map(str, channel)) if isinstance(channel, tuple) else channel
                thread = threading.Thread(target=_serve, args=(queue,), daemon=True, name=f"{_PREFIX}{named}")
                self._threads.append(thread)
                thread.start()
        return queue


def _serve(queue: Queue) -> None:
    while (transfer := queue.get()) is not None:
        transfer.follow()
        del transfer  # or this frame would hold it until the next one comes
