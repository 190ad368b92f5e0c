"""What the device has done, asked from a thread of its own.

``torch.cuda.Event.query`` keeps Python's interpreter lock, and a query may block as long as another thread synchronises
the device (pytorch#130844): where that waits for a dead peer, until an abort. So another thread asks than the one that
aborts, and ctypes gives the lock back around each call. A new thread is on device 0, where a call would make a context
of half a GiB (torchcomms#777), and fails while a CUDA graph is captured.
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
    from megatron_pp.faults.places import Place

logger = logging.getLogger("megatron_pp")

# cudaError_t and cudaStreamCaptureMode.
_SUCCESS, _NOT_READY = 0, 600
_RELAXED = 2

# Seconds.
_ANSWER = 0.05  # that an answer is waited for; it takes microseconds where no query blocks
_JOIN = 1.0


class EventQueries:
    """``is_over(event)`` in the thread that has called ``begin``; ``device``: where the events are recorded."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._runtime: Any = None

    def begin(self) -> None:
        """Choose the device for this thread, and let it ask while the main thread captures a CUDA graph: by default
        that is an error and ends the capture (``cudaThreadExchangeStreamCaptureMode``)."""
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
        """Raises RuntimeError where an earlier kernel has failed."""
        if self._runtime is None:
            return bool(event.query())
        code = self._runtime.cudaEventQuery(event.cuda_event)
        if code == _NOT_READY:
            self._runtime.cudaGetLastError()  # else the next call of this thread would report it
        elif code != _SUCCESS:
            raise RuntimeError(f"cudaEventQuery returned {code}")
        return bool(code == _SUCCESS)


class CompletedWork:
    """Marks on the streams of one rank, over all steps. The main thread adds them; a thread of their own, which the
    watchdog ``ask``s, removes those that are over."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._marks: deque[tuple[Place, Any]] = deque()
        self.queries = EventQueries(device)
        self.events = EventPool()
        self._thread: threading.Thread | None = None
        self._asked, self._answered = threading.Event(), threading.Event()
        self._unanswered_since: float | None = None
        self._closed = False

    def mark(self, place: Place) -> None:
        """``place`` is over when all that was issued to the current stream is."""
        self._marks.append((place, self.events.record()))

    def ask(self) -> None:
        """For the watchdog: have the marks removed that are over. Where a query blocks, return a moment later; the
        marks stay as they are until it returns."""
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
        """When what ``oldest`` says was so, by the monotonic clock: now, or when the query began that has not
        returned."""
        since = self._unanswered_since
        return time.monotonic() if since is None else since

    def close(self, wait: bool = True) -> None:
        """End the thread; one that is stuck in a query stays until that returns, and asks nothing more."""
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
        """The host waits for all that was issued to the current stream, unless a graph is captured on it."""
        if torch.cuda.is_current_stream_capturing():
            return
        event = self.events.record()
        event.synchronize()
        self.events.give_back(event)

    def clear(self) -> None:
        """The first of them may be asked for just now: none of their events is used again."""
        self._marks = deque()

    @property
    def oldest(self) -> Place | None:
        """The first mark that is not over; None if all are."""
        try:
            return self._marks[0][0]
        except IndexError:  # another thread may have removed it just now
            return None
