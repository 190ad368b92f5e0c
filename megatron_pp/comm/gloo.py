"""A thread for each channel of gloo, which waits for the channel's transfers ahead of the rank that needs them.

Three things that gloo does make it necessary:

- It does not wake everybody when a connection ends (see ``comm/abort.py``): not who waits for a transfer that is
  half on the wire, of whatever direction, and not who waits for a send, of whatever size, that was written to a
  connection which the other side had just reset: ``Pair::write`` (gloo/transport/tcp/pair.cc) takes that for "try
  again later" and queues the send, and ``Pair::signalException`` passes over what is queued there. It offers no other
  way to wake them. A thread that is stuck in such a wait ends with the process, or when the process group's own
  timeout is over; the rank is woken by ``interrupt``. Receives of messages that go into the socket's buffer as a
  whole cannot get stuck, and are waited for directly.
- It cannot tell whether a transfer is over before somebody waits for it. A helper that waits when it is asked has to
  be woken even where the transfer was over long before; here the answer is there.
- It writes to the socket in the thread that posts a send, for as long as the socket takes bytes. Measured with torch
  2.13 on a link of 1 Gbit/s, receive posted: 4 to 20 ms for messages of 0.5 to 16 MB, and up to 160 ms where the same
  connection receives at the time, for its lock has to be won from the thread that reads. All of that would be compute
  time lost to communication that was asked to overlap it. So the large sends of a channel with a connection of its own
  are posted by its thread too; in order, each when the one before it is over.
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

# What a TCP socket takes without its peer reading is at least this on Linux (net.core.wmem_default 212,992 bytes, half
# of it payload).
LARGE_BYTES = 64 * 1024
_PREFIX = "megatron_pp "  # of the threads' names
_PATIENCE = 1.0  # seconds for all threads to end; those that are stuck stay


class InterruptedTransferError(MegatronPPError, RuntimeError):
    """The wait was ended from another thread; the transfer is not done and never will be."""


class Transfer:
    """The work of one transfer, as torch's Work."""

    __slots__ = ("_error", "_is_over", "_post", "_queue", "_threads", "_work")

    def __init__(self, threads: ChannelThreads, queue: Queue, work: Any, post: Callable[[], Any] | None = None) -> None:
        self._threads = threads
        self._queue: Queue | None = queue
        self._work = work
        self._post = post
        self._error: BaseException | None = None
        self._is_over = False

    def begin(self) -> None:
        """Have the channel's thread follow it from now on."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.put(self)

    def follow(self) -> None:
        """In the channel's thread: post it, if that is still to be done, and see it through."""
        work, post = self._work, self._post
        self._work = self._post = None
        try:
            (work if post is None else post()).wait(*self._threads.limit)
        except BaseException as error:  # for the one who waits
            self._error = error
        del work, post  # they hold the tensor
        self._is_over = True
        self._threads.tell(self)

    @property
    def is_over(self) -> bool:
        """Whether it is done, or failed."""
        return self._is_over

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when done. Raises what the transfer raised, RuntimeError ("Timed out") after ``timeout``,
        InterruptedTransferError."""
        if not self._is_over:
            self.begin()
            self._threads.await_end(self, timeout)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_over and self._error is None


Queue = SimpleQueue[Transfer | None]


class ChannelThreads:
    """The threads of one rank's channels. One thread at a time may wait; ``interrupt`` may be called from any.

    ``limit``: the timeout of each transfer, if it is not that of its process group.
    """

    def __init__(self) -> None:
        self.limit: tuple[timedelta, ...] = ()
        self._why: str | None = None
        self._queues: dict[Hashable, Queue] = {}
        self._threads: list[threading.Thread] = []
        self._awaited: Transfer | None = None
        self._calls: SimpleQueue[None] = SimpleQueue()  # each means: look again

    def follow(self, channel: Hashable, work: Any, ahead: bool = True) -> Transfer:
        """A transfer of ``channel`` that was posted. Followed at once, or not before it is waited for: for small
        messages, which are over when they are posted, waking a thread for each costs more than it saves.
        """
        transfer = Transfer(self, self._queue_of(channel), work)
        if ahead:
            transfer.begin()
        return transfer

    def post(self, channel: Hashable, post: Callable[[], Any]) -> Transfer:
        """A transfer of ``channel`` that its thread is to post: ``post()`` returns torch's work."""
        transfer = Transfer(self, self._queue_of(channel), None, post)
        transfer.begin()
        return transfer

    def await_end(self, transfer: Transfer, timeout: timedelta | None) -> None:
        """Return when ``transfer`` is over; raises as its ``wait``."""
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        self._awaited = transfer  # before looking, as its thread looks here after it has ended it: one of both sees it
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

    def tell(self, transfer: Transfer) -> None:
        """``transfer`` is over."""
        if self._awaited is transfer:
            self._calls.put(None)

    def interrupt(self, why: str) -> None:
        """End the wait that is going on, and every later one for what is not over. The threads end as soon as they are
        not inside a transfer."""
        self._why = self._why or why
        self._calls.put(None)
        for queue in list(self._queues.values()):
            queue.put(None)

    def close(self) -> None:
        """As ``end``; logs the threads that stay."""
        stuck = self.end()
        if stuck:
            logger.warning(
                "gloo cannot end %d transfer(s) to or from a rank that failed; each holds its tensor, a thread and a "
                "connection until the process group's timeout is over: %s",
                len(stuck), "; ".join(stuck),
            )  # fmt: skip

    def end(self) -> list[str]:
        """End the threads, when they have posted what they were given; call when no wait is going on. Returns the
        names of those that stay."""
        self.interrupt("the communicator was closed")
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(max(0.0, until - time.monotonic()))
        return [thread.name.removeprefix(_PREFIX) for thread in self._threads if thread.is_alive()]

    def _queue_of(self, channel: Hashable) -> Queue:
        queue = self._queues.get(channel)
        if queue is None:
            queue = self._queues[channel] = Queue()
            if self._why is None:  # else nobody would end it
                named = " ".join(map(str, channel)) if isinstance(channel, tuple) else channel
                thread = threading.Thread(target=_serve, args=(queue,), daemon=True, name=f"{_PREFIX}{named}")
                self._threads.append(thread)
                thread.start()
        return queue


def _serve(queue: Queue) -> None:
    while (transfer := queue.get()) is not None:
        transfer.follow()
        del transfer  # it would stay until the next one comes
