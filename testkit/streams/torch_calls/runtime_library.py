"""``libcudart`` for the threads of virtual devices. Calls go through ctypes, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from testkit.streams.host_process import relax

VERSION = "13.0"
"""``torch.version.cuda``."""

SUCCESS, NOT_READY, CAPTURE_UNSUPPORTED = 0, 600, 900
_RELAXED = 2  # cudaStreamCaptureMode
EVENTS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Events of virtual devices, by their handle."""

_real = ctypes.CDLL


class _Runtime:
    """The library that ``ctypes.CDLL`` returns. Its functions accept ``argtypes``."""

    def __init__(self) -> None:
        self.cudaEventQuery = _function(_query)
        self.cudaGetLastError = _function(lambda: SUCCESS)
        self.cudaThreadExchangeStreamCaptureMode = _function(_exchange_capture_mode)


def _function(body: Callable[..., int]) -> Any:
    return lambda *arguments: body(*arguments)


def _query(handle: int) -> int:
    try:
        return SUCCESS if EVENTS[handle].query(False) else NOT_READY
    except RuntimeError:
        return CAPTURE_UNSUPPORTED


def _exchange_capture_mode(mode: Any) -> int:
    relax(mode._obj.value == _RELAXED)
    return SUCCESS


class Library(_real):
    """``ctypes.CDLL``, which returns a ``_Runtime`` for CUDA's runtime library."""

    def __new__(cls, name: Any = None, *arguments: Any, **more: Any) -> Any:
        if str(name).startswith("libcudart.so"):
            return _Runtime()
        return _real(name, *arguments, **more)
