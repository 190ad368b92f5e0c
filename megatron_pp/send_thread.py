"""Posting the large sends of one gloo channel from a thread of its own.

gloo writes to the socket in the thread that posts a send, for as long as the socket takes bytes. Measured with torch
2.13 on a link of 1 Gbit/s, receive posted: 4 to 20 ms for messages of 0.5 to 16 MB, and up to 160 ms where the same
connection receives at the time, for its lock has to be won from the thread that reads. All of that would be compute
time lost to communication that was asked to overlap it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

_PATIENCE = 1.0  # seconds for the thread to end; one that is stuck ends with the process


class PostedLater:
    """The work of a send that a thread posts; ``wait`` as torch's Work."""

    __slots__ = ("_error", "_post", "_posted", "_work")

    def __init__(self, post: Callable[[], Any]) -> None:
        self._post: Callable[[], Any] | None = post
        self._posted = threading.Event()
        self._work: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Post the send; what that raises is raised by ``wait``."""
        post, self._post = self._post, None
        assert post is not None
        try:
            self._work = post()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        self._posted.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError where the send failed or was not done in time."""
        if timeout is None:
            self._posted.wait()
            self._raise_error()
            self._work.wait()
            return True
        until = time.monotonic() + timeout.total_seconds()
        if not self._posted.wait(timeout.total_seconds()):
            raise RuntimeError(f"Timed out after {timeout.total_seconds()} s waiting for an earlier send to be posted")
        self._raise_error()
        self._work.wait(max(timedelta(milliseconds=1), timedelta(seconds=until - time.monotonic())))
        return True

    def is_completed(self) -> bool:
        return self._posted.is_set() and self._work is not None and bool(self._work.is_completed())

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class SendThread:
    """Posts sends one after another, in the order in which they are given to it."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[PostedLater | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), daemon=True, name=name)
        self._thread.start()

    def post(self, post: Callable[[], Any]) -> PostedLater:
        """``post()`` posts the send and returns its work."""
        later = PostedLater(post)
        self._queue.put(later)
        return later

    def close(self) -> None:
        """End the thread once it has posted what it was given."""
        self._queue.put(None)
        self._thread.join(_PATIENCE)


def _serve(queue: SimpleQueue[PostedLater | None]) -> None:
    while (later := queue.get()) is not None:
        later.run()
        del later  # it holds the work, and the work its tensor, while the next one is waited for
