"""Asks in a thread of its own what the device has completed.

``torch.cuda.Event.query`` keeps Python's interpreter lock, and a query may block while another thread synchronises the
device (pytorch#130844). If that thread waits for a dead peer, the query blocks until an abort. So the thread that asks
is not the one that aborts, and ctypes releases the lock around each call. A new thread is on device 0, where a call
would make a context of half a GiB (torchcomms#777); and its calls fail while a CUDA graph is captured.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.comm.events import EventPool

if TYPE_CHECKING:
    from megatron_pp.faults.position.places import Place

logger = logging.getLogger("megatron_pp")

# cudaError_t and cudaStreamCaptureMode.
_SUCCESS, _NOT_READY = 0, 600
_RELAXED = 2

# Seconds.
_ANSWER = 0.05  # time to wait for an answer, which takes microseconds if no query blocks
_JOIN = 1.0


class EventQueries:
    """Queries events in the thread that has called ``begin``. ``device``: the device on which they are recorded."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._runtime: Any = None

    def begin(self) -> None:
        """Choose the device for this thread, and allow queries while the main thread captures a CUDA graph. By default
        such a query is an error and ends the capture (``cudaThreadExchangeStreamCaptureMode``)."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
        if torch.version.cuda is None:
            return
        name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"  # torch has loaded it
        try:
            runtime = ctypes.CDLL(name)
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
            runtime.cudaEventQuery.argtypes = [ctypes.c_void_p]
            runtime.cudaGetLastError.argtypes = []
            self._runtime = runtime
        except (OSError, AttributeError) as error:
            logger.warning(
                "%s: %s; while a pipeline step is watched, capturing a CUDA graph may fail, and a query that blocks "
                "holds up all threads of this process",
                name, error,
            )  # fmt: skip

    def is_over(self, event: Any) -> bool:
        """Whether ``event`` is over. Raises RuntimeError if an earlier kernel has failed."""
        if self._runtime is None:
            return bool(event.query())
        code = self._runtime.cudaEventQuery(event.cuda_event)
        if code == _NOT_READY:
            self._runtime.cudaGetLastError()  # clears the error, which this thread's next call would report again
        elif code != _SUCCESS:
            raise RuntimeError(f"cudaEventQuery returned {code}")
        return bool(code == _SUCCESS)


class CompletedWork:
    """Marks on the streams of one rank, in all steps. The main thread adds marks. Another thread, which the watchdog
    ``ask``s, removes those that are over."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._marks: deque[tuple[Place, Any]] = deque()
        self.queries = EventQueries(device)
        self.events = EventPool()
        self._thread: threading.Thread | None = None
        self._asked, self._answered = threading.Event(), threading.Event()
        self._unanswered_since: float | None = None
        self._closed = False

    def mark(self, place: Place) -> None:
        """Add a mark: ``place`` is over when all that was issued to the current stream is over."""
        self._marks.append((place, self.events.record()))

    def ask(self) -> None:
        """Called by the watchdog: have marks removed that are over. If a query blocks, this returns a moment later, and
        marks stay as they are until the query returns."""
        if not self._marks or self._closed:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, daemon=True, name="megatron_pp events")
            thread.start()
            self._thread = thread  # ``close`` joins it
        if self._unanswered_since is None or self._answered.is_set():
            self._unanswered_since = time.monotonic()
            self._answered.clear()
            self._asked.set()
        if self._answered.wait(_ANSWER):
            self._unanswered_since = None

    @property
    def known_at(self) -> float:
        """The time for which ``oldest`` is right, by the monotonic clock: now, or the beginning of a query that has not
        returned."""
        since = self._unanswered_since
        return time.monotonic() if since is None else since

    def close(self, wait: bool = True) -> None:
        """End the thread. If it is stuck in a query it stays until the query returns, and then ends."""
        self._closed = True
        self._asked.set()
        if wait and self._thread is not None:
            self._thread.join(_JOIN)

    def _run(self) -> None:
        self.queries.begin()
        while self._asked.wait() and not self._closed:
            self._asked.clear()
            self.poll()
            self._answered.set()

    def poll(self) -> None:
        marks = self._marks
        try:
            while not self._closed and self.queries.is_over(marks[0][1]):
                self.events.give_back(marks.popleft()[1])
        except IndexError:  # all are over, or forgotten by the main thread
            return
        except RuntimeError as error:  # of an earlier kernel; the main thread gets it too
            logger.debug("the device cannot be asked any more: %s", error)
            marks.clear()

    def synchronize(self) -> None:
        """Block the host until all that was issued to the current stream is over, unless a graph is captured on it."""
        if torch.cuda.is_current_stream_capturing():
            return
        event = self.events.record()
        event.synchronize()
        self.events.give_back(event)

    def clear(self) -> None:
        """Forget all marks. Their events are not used again, because a query of the first may be going on."""
        self._marks = deque()

    @property
    def oldest(self) -> Place | None:
        """The first mark that is not over; None if all are."""
        try:
            return self._marks[0][0]
        except IndexError:  # another thread may have removed it just now
            return None
