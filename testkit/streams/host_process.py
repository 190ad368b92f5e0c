"""The Python process of a rank: its threads, the current device of each, and their interpreter lock.

A thread that has chosen no device is on device 0, whatever device its process uses. Any CUDA call there makes a
context, which takes 534 MiB on an H100 (torchcomms#777, torchcomms#4105). A query of an event can block while another
thread of the process waits for the device (pytorch#130844). ``torch.cuda.Event.query`` keeps the interpreter lock
during that time (torch/csrc/cuda/Event.cpp), so all Python threads of the process stop. A call through ctypes does not
keep it.

A launch that loads its kernel, and a call that returns memory, wait for the device under the lock of its context. Calls
of other threads wait for this lock, also event queries and aborts (torchcomms#2334). NCCL's abort sets a flag that ends
its kernels before it calls CUDA. So on a GPU an abort may succeed; this was not measured.

A thread belongs to the process of the thread that starts it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

_PACKAGE, _SIMULATION = "megatron_pp.", "megatron_pp.testing."
_start_of_threading = threading.Thread.start

_here = threading.local()  # process: that of this thread; chosen: index of its current device


def this_process() -> HostProcess | None:
    return getattr(_here, "process", None)


def chosen_device() -> int:
    """The index of this thread's current device, as by ``cudaGetDevice``."""
    return getattr(_here, "chosen", 0)


class Capture:
    """The capture of a stream by a thread. ``mode``: "global", "thread_local" or "relaxed"."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.thread = threading.get_ident()
        self.broken_by = ""

    def forbids(self) -> bool:
        """Whether this thread may neither query the device nor wait for it."""
        if self.thread == threading.get_ident():
            return self.mode != "relaxed"
        return self.mode == "global" and not getattr(_here, "relaxed", False)


class HostProcess:
    """The process of one rank. ``index``: that of its main thread's device. ``queries_block``: whether a query of an
    event blocks while a thread of the process waits for the device. ``context_lock``: whether calls wait while another
    thread is in ``holds_context``."""

    def __init__(self, index: int, queries_block: bool = False, context_lock: bool = True) -> None:
        self.index = index
        self.queries_block = queries_block
        self.context_lock = context_lock
        self.capture: Capture | None = None
        self.contexts: dict[int, str] = {}  # contexts on other devices, by index: the call that made it
        self._gate = threading.Condition()
        self._waiting = 0  # threads that wait for the device
        self._keeper: int | None = None  # the thread that waits in a call that keeps the interpreter lock
        self._holder: int | None = None  # the thread that waits under the context's lock

    @contextmanager
    def main_thread(self) -> Iterator[None]:
        """A context in which this thread is the process's main thread, and has chosen its device."""
        _here.process = self
        _here.chosen = self.index
        try:
            yield
        finally:
            _here.process, _here.chosen = None, 0

    def choose(self, index: int, is_main: bool) -> None:
        """``cudaSetDevice`` in this thread. From CUDA 12 on it makes a context."""
        if is_main:
            self.index = index
        _here.chosen = index
        self.calls("cudaSetDevice")

    def calls(self, what: str, index: int | None = None) -> None:
        """Called when this thread calls CUDA on its current device, or on device ``index``. Returns when the call may
        run."""
        self._note_context(what, index)
        self.waits_for_context()

    def _note_context(self, what: str, index: int | None) -> None:
        on = chosen_device() if index is None else index
        if on != self.index and on not in self.contexts:
            self.contexts[on] = (
                f"{what} in thread {threading.current_thread().name!r} makes a context on cuda:{on}, where the process "
                f"uses cuda:{self.index}"
            )

    def is_capturing(self) -> bool:
        """Whether this thread captures a stream."""
        return self.capture is not None and self.capture.thread == threading.get_ident()

    def asks(self, what: str, was_captured: bool = False) -> None:
        """Called when this thread queries the device or waits for it. ``was_captured``: whether for an event that was
        recorded in a capture. If a capture forbids the call, it ends the capture and raises RuntimeError."""
        capture = self.capture
        if was_captured or (capture is not None and capture.forbids()):
            if capture is not None:
                capture.broken_by = capture.broken_by or f"{what} in thread {threading.current_thread().name!r}"
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    # -- waits of threads ------------------------------------------------------------------------------------------

    @contextmanager
    def waits_for_device(self) -> Iterator[None]:
        with self._gate:
            self._waiting += 1
        try:
            yield
        finally:
            with self._gate:
                self._waiting -= 1
                self._gate.notify_all()

    @contextmanager
    def holds_context(self) -> Iterator[None]:
        """A context in which this thread is in a call that waits for the device under the lock of its context."""
        if not self.context_lock:
            yield
            return
        with self._gate:
            self._gate.wait_for(lambda: not self._is_locked_out())
            before, self._holder = self._holder, threading.get_ident()
        try:
            yield
        finally:
            with self._gate:
                self._holder = before
                self._gate.notify_all()

    def waits_for_context(self) -> None:
        """Called when this thread calls CUDA. Returns when no other thread holds the context's lock."""
        if self._is_locked_out():
            with self._gate:
                self._gate.wait_for(lambda: not self._is_locked_out())

    def _is_locked_out(self) -> bool:
        return self._holder is not None and self._holder != threading.get_ident()

    def _holds_up_queries(self) -> bool:
        return self._is_locked_out() or (self.queries_block and self._waiting > 0)

    def queries(self, keeps_lock: bool, was_captured: bool) -> None:
        """Called when this thread queries an event. Returns when the driver answers."""
        self._note_context("cudaEventQuery", None)
        self.asks("cudaEventQuery", was_captured)
        if not self._holds_up_queries():
            return
        with self._gate:
            if keeps_lock and self._holds_up_queries():
                self._keeper = threading.get_ident()
            self._gate.wait_for(lambda: not self._holds_up_queries())
            self._keeper = None
            self._gate.notify_all()

    def _run_until_stopped(self, frame: FrameType, event: str, argument: Any) -> None:
        """The trace function of the process's threads. At each call in the package it waits for the interpreter
        lock."""
        name = frame.f_globals.get("__name__", "")
        if self._keeper is None or not name.startswith(_PACKAGE) or name.startswith(_SIMULATION):
            return
        with self._gate:
            self._gate.wait_for(lambda: self._keeper in (None, threading.get_ident()))

    def run_thread(self, run: Callable[[], object]) -> None:
        """Call ``run`` in a thread of this process."""
        _here.process = self
        _here.relaxed = False
        if self.queries_block:
            sys.settrace(self._run_until_stopped)
        try:
            run()
        finally:
            _here.process = None


def relax(is_relaxed: bool) -> None:
    """``cudaThreadExchangeStreamCaptureMode`` in this thread."""
    calls_cuda("cudaThreadExchangeStreamCaptureMode")
    _here.relaxed = is_relaxed


def start_thread(thread: threading.Thread) -> None:
    """Replaces ``Thread.start``. The new thread belongs to the process of this one."""
    process = this_process()
    if process is not None:
        run = thread.run
        thread.run = lambda: process.run_thread(run)  # type: ignore[method-assign]
    _start_of_threading(thread)


def calls_cuda(what: str, device: Any = None) -> None:
    """Called when this thread calls CUDA for ``device``: a torch.device, its name or index. None, or no index: the
    current one."""
    process = this_process()
    if process is not None:
        process.calls(what, device if device is None or isinstance(device, int) else torch.device(device).index)
