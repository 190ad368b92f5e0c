"""Backwards in a thread of autograd, without a GPU.

On a GPU torch runs a backward, and its recomputation, in a thread that it keeps for the device. That thread lacks the
caller's thread-locals and context variables, and has those that an earlier backward left. On the CPU torch runs a
backward in the caller's thread, so tests on a CPU do not find code that reads them. ``autograd_thread()`` moves
backwards to another thread:

    with autograd_thread():
        loss.backward()

The thread gets the state that torch gives its own threads (``at::ThreadLocalState``): autocast, the modes of torch
functions and dispatch, hooks of saved tensors, the stashed context. A backward within a backward stays in its thread.
So does a backward under ``torch.autograd.set_multithreading_enabled(False)``.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.variable import Variable
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

Carried = AbstractContextManager[Any]

_here = threading.local()  # device_thread: that of this caller; in_one: whether this thread is a device thread
os.register_at_fork(after_in_child=lambda: vars(_here).clear())  # a forked process has no other threads
_OF_PROCESS: list[Callable[[], Callable[[], Carried]]] = []
_CONTEXT = "context"  # the caller's state that torch.autograd stashes, from 2.10 on
_DEVICES = ("cpu", "cuda")


def carry(capture: Callable[[], Callable[[], Carried]]) -> None:
    """Carry a thread-local of ranks to their device threads: if ranks are threads, it replaces a variable of the
    process. ``capture()`` is called in the rank's thread. The context that it returns is entered in the device
    thread."""
    _OF_PROCESS.append(capture)


@contextmanager
def autograd_thread() -> Iterator[None]:
    """A context in which backwards of this process run in another thread than their caller's, one for each calling
    thread."""
    with patch.object(Variable, "_execution_engine", AutogradThreads(Variable._execution_engine)):
        yield


class AutogradThreads:
    """``torch.autograd``'s engine, with backwards in a device thread."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "in_one", False) or not torch._C._is_multithreading_enabled():
            return self.engine.run_backward(*args, **kwargs)
        if not hasattr(_here, "device_thread"):
            _here.device_thread = _DeviceThread()
        states = [_thread_local_state(), *(capture() for capture in _OF_PROCESS)]

        def backward() -> Any:
            with ExitStack() as entered:
                for state in states:
                    entered.enter_context(state())
                return self.engine.run_backward(*args, **kwargs)

        return _here.device_thread.run(backward)


class _Job:
    """A call that another thread runs."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:  # raised in the caller
            self.error = error
        self.done.set()

    def wait(self) -> Any:
        """Wait for the result. As in torch, a signal's exception is raised when the backward is over."""
        interruption: BaseException | None = None
        while not self.done.is_set():
            try:
                self.done.wait()
            except BaseException as error:
                interruption = error
        failure = interruption or self.error
        self.error = None
        try:
            if failure is not None:
                raise failure
            return self.result
        finally:
            del failure  # its traceback keeps this frame alive


class _DeviceThread:
    """A device thread. It lives as long as the thread that calls it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # ``threading`` does not know it, as it does not know torch's threads.
        _thread.start_new_thread(_work, (self._jobs,))
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def run(self, call: Callable[[], Any]) -> Any:
        job = _Job(call)
        self._jobs.put(job)
        return job.wait()


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    _here.in_one = True
    while True:
        job = jobs.get()
        if job is None:
            return
        job.run()
        del job  # drops the tensors of its call too


def _thread_local_state() -> Callable[[], Carried]:
    """The caller's thread-local state, as a context for another thread."""
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES]
    cached = torch.is_autocast_cache_enabled()
    functions = _get_current_function_mode_stack()
    operations = dispatch._get_current_dispatch_mode_stack()
    hooks = _saved_tensor_hooks()
    context = torch._C._get_obj_in_tls(_CONTEXT) if torch._C._is_key_in_tls(_CONTEXT) else None

    @contextmanager
    def entered() -> Iterator[None]:
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)
        with ExitStack() as after:
            for mode in functions:
                _push_mode(mode)
                after.callback(_pop_mode)
            for operation in operations:
                dispatch._push_mode(operation)
                after.callback(dispatch._pop_mode)
            for pack, unpack in hooks:
                torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
                after.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            if context is not None:
                torch._C._stash_obj_in_tls(_CONTEXT, context)
                after.callback(torch._C._remove_obj_from_tls, _CONTEXT)
            yield

    return entered


def _saved_tensor_hooks() -> list[tuple[Any, Any]]:
    """This thread's hooks of saved tensors, the outermost first."""
    stack: Any = torch._C._autograd
    hooks: list[tuple[Any, Any]] = []
    while (top := stack._top_saved_tensors_default_hooks(False)) is not None:
        hooks.insert(0, top)
        stack._pop_saved_tensors_default_hooks()
    for pack, unpack in hooks:
        stack._push_saved_tensors_default_hooks(pack, unpack)
    return hooks
