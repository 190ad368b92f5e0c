"""``torch.cuda`` for ranks that are threads: streams, events and queries of a virtual device.

Within ``virtual_cuda`` names in ``torch.cuda`` are replaced. In the threads of ranks they use the rank's device. In all
other threads, such as the fault guard's, they use a device that is always idle. Threads that a rank has started belong
to its process (``host_process.py``).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.variable import Variable

from megatron_pp.weight_grad.deferred import tensors_in
from testkit.streams.device import VirtualDevice, current_device
from testkit.streams.host_process import calls_cuda, chosen_device, start_thread, this_process
from testkit.streams.timelines import Clock, Lane, Transfer
from testkit.streams.torch_calls.capture import CUDAGraph, graph_pool_handle, is_capturing
from testkit.streams.torch_calls.recorder import PassingMode
from testkit.streams.torch_calls.runtime_library import EVENTS, VERSION, Library

_OPEN = threading.Lock()  # the process has only one torch.cuda
_NVTX = "MEGATRON_PP_NVTX"
_MOST_DEVICES = 64
_apply: Any = vars(torch.autograd.Function)["apply"]  # a classmethod; from torch 2.15 on it is written in C
_applied = getattr(_apply, "__func__", _apply)


def _here() -> VirtualDevice:
    device = current_device()
    if device is None:
        raise RuntimeError("this thread is not a rank of a virtual device")
    return device


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, lane: Lane | None = None, **more: Any) -> None:
        calls_cuda("a stream", device)
        here = _here()
        self.device = here.place
        self.lane = here.pooled_stream(priority < 0) if lane is None else lane
        self.priority = priority

    @property
    def cuda_stream(self) -> int:
        return self.lane.number

    stream_id = cuda_stream

    def wait_stream(self, stream: Stream) -> None:
        self.lane.wait_for_lane(stream.lane)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        _here().synchronize([self.lane], "a stream's synchronize")

    def query(self) -> bool:
        if self.lane.unfinished():
            return False
        self.lane.host.learn(self.lane.now(), self.lane.record())
        return True

    def is_capturing(self) -> bool:
        return is_capturing() and self.lane is _here().stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.lane is self.lane

    def __hash__(self) -> int:
        return self.lane.number

    def __enter__(self) -> Stream:
        self._before = current_stream()
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_stream(self._before)


class Event:
    """``torch.cuda.Event``. Each issued operation takes a microsecond, and ``_sleep`` its own time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **more: Any) -> None:
        self._device = _here()
        self._clock: Clock = {}
        self._pending: set[Transfer] = set()
        self._number = 0
        self._time = 0.0
        self._was_captured = False
        self.cuda_event = id(self)
        EVENTS[self.cuda_event] = self

    def record(self, stream: Stream | None = None) -> None:
        lane = self._device.stream if stream is None else stream.lane
        self._clock = dict(lane.now())
        self._pending = set(lane.unfinished())
        self._number = lane.record()
        self._was_captured = self._device.process.is_capturing()
        self._time = 1e-3 * self._device.operations + self._device.slept

    def wait(self, stream: Stream | None = None) -> None:
        lane = self._device.stream if stream is None else stream.lane
        lane.wait_for(self._clock, self._pending, self._number)

    def query(self, keeps_lock: bool = True) -> bool:
        """Whether the event is over. ``keeps_lock``: whether the call keeps Python's interpreter lock, as torch's
        does."""
        process = this_process()
        if process is not None:
            process.queries(keeps_lock, self._was_captured)
        if not all(work.finished for work in self._pending):
            return False
        if current_device() is self._device:  # does not hold in another thread, such as the fault guard's
            self._device.host.learn(self._clock, self._number)
        return True

    def synchronize(self) -> None:
        self._device.block(lambda: all(work.finished for work in self._pending), "an event's synchronize")
        self._device.host.learn(self._clock, self._number)

    def elapsed_time(self, other: Event) -> float:
        """The milliseconds between two events."""
        return other._time - self._time


def current_stream(device: Any = None) -> Stream:
    return Stream(lane=_here().stream)


def default_stream(device: Any = None) -> Stream:
    return Stream(lane=_here().default)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _here().nodes.set(stream.lane)


def _on_stream(chosen: Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if chosen is None else chosen


def _sleep(cycles: int) -> None:
    """Sleep on the device, at one gigahertz."""
    here = _here()
    here.stream_step("_sleep")
    here.log.issued(here.rank)
    here.slept += 1e-6 * cycles


def _set_device(device: Any) -> None:
    process = this_process()
    index = device if isinstance(device, int) else torch.device(device).index
    if process is not None and index is not None and index >= 0:
        process.choose(index, current_device() is not None)


def _device_count() -> int:
    here = current_device()
    return 1 if here is None else here.network.num_devices


def _synchronize(device: Any = None) -> None:
    calls_cuda("torch.cuda.synchronize", device)
    here = current_device()
    if here is not None:
        here.synchronize(here.lanes, "torch.cuda.synchronize")


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    calls_cuda("cudaMemGetInfo", device)
    return 0, 0


def _range_push(message: str) -> int:
    here = current_device()
    if here is not None:
        here.ranges.append(message)
        here.log.begin(here.rank, message)
    return 0


def _range_pop() -> int:
    here = current_device()
    if here is not None and here.ranges:
        here.ranges.pop()
        here.log.end(here.rank)
    return 0


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _Engine:
    """``torch.autograd``'s engine, whose backwards use the streams of their rank's device."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(
        self,
        tensors: Any,
        grad_tensors: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Any = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        """Run a backward in the rank's function mode. torch leaves its function modes while it handles a call, also
        ``backward``."""
        here = current_device()
        args = tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
        if here is None:
            return self.engine.run_backward(*args)
        mode = nullcontext() if torch._C._len_torch_function_stack() else here.tensors
        assert mode is not None
        with mode, here.nodes.backward(tensors, grad_tensors, inputs):
            return self.engine.run_backward(*args)


@classmethod  # type: ignore[misc]
def _apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.Function.apply``, which bypasses function modes."""
    result = _applied(cls, *args, **kwargs)
    here = current_device()
    if here is not None:
        here.nodes.made(tensors_in(result))
    return result


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    _here().record_stream(tensor, stream.lane)


_REPLACED: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_initialized"), _constant(True)),
    **dict.fromkeys(("_lazy_init", "init", "empty_cache", "reset_peak_memory_stats"), _nothing),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated"), _constant(0)),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved"), _constant(0)),
    "mem_get_info": _mem_get_info,
    "set_device": _set_device,
    "current_device": chosen_device,
    "device_count": _device_count,
    "get_device_name": _constant("virtual device"),
    "get_device_capability": _constant((9, 0)),
    "is_current_stream_capturing": is_capturing,
    "CUDAGraph": CUDAGraph,
    "graph_pool_handle": graph_pool_handle,
    "device": _constant(nullcontext()),
    "Stream": Stream,
    "Event": Event,
    "stream": _on_stream,
    "set_stream": set_stream,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "synchronize": _synchronize,
    "_sleep": _sleep,
    "default_generators": (torch.default_generator,) * _MOST_DEVICES,
}
_OF_ANY_ACCELERATOR = {  # names of torch.accelerator -> the same functions of torch.cuda
    **{name: name for name in ("is_available", "device_count", "current_stream", "set_stream", "synchronize")},
    **{name: name for name in ("empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated")},
    **{name: name for name in ("max_memory_reserved", "reset_peak_memory_stats")},
    **dict.fromkeys(("current_device_index", "current_device_idx"), "current_device"),
    **dict.fromkeys(("set_device_index", "set_device_idx"), "set_device"),
}
_REPLACED_NVTX = SimpleNamespace(rangePushA=_range_push, rangePop=_range_pop, markA=_nothing)


@contextmanager
def replaced(places: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """A context in which each place has the replacement under the name, for each (place, name, replacement)."""
    with ExitStack() as meanwhile:
        for place, name, new in places:
            meanwhile.enter_context(patch.object(place, name, new, create=True))
        yield


@contextmanager
def virtual_cuda() -> Iterator[None]:
    """A context in which ``torch.cuda`` is virtual. The engine names its instructions by NVTX ranges
    (MEGATRON_PP_NVTX), which reports quote. A process has at most one at a time."""
    places: list[tuple[Any, str, Any]] = [(torch.cuda, name, new) for name, new in _REPLACED.items()]
    places += [(torch.accelerator, name, _REPLACED[same]) for name, same in _OF_ANY_ACCELERATOR.items()]
    places += [(torch.accelerator, "current_accelerator", _constant(torch.device("cuda")))]
    places += [(torch.cuda.nvtx, "_nvtx", _REPLACED_NVTX)]
    places += [(torch, "set_default_device", _nothing)]  # all new tensors are on the device anyway
    places += [(torch.cuda.nccl, "version", _constant((0, 0, 0))), (torch.version, "cuda", VERSION)]
    places += [(ctypes, "CDLL", Library), (threading.Thread, "start", start_thread)]
    places += [(torch.cuda.random, name, _REPLACED[name]) for name in ("current_device", "device_count")]
    places += [(torch.Tensor, "record_stream", _record_stream), (torch.autograd.Function, "apply", _apply_function)]
    places += [(Variable, "_execution_engine", _Engine(Variable._execution_engine))]
    importlib.import_module("torch._dynamo")  # torch imports it late, and it needs the real torch.cuda
    with _OPEN, replaced(places), patch.dict(os.environ, {_NVTX: "1"}), PassingMode():
        yield
