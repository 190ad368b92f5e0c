"""Whether an event of the device is over, asked from a thread of the guard's.

``torch.cuda.Event.query`` keeps Python's interpreter lock, and a query may block as long as another thread synchronises
the device (pytorch#130844): heartbeats and aborts would wait with it. ctypes gives the lock back around each call. A
new thread is on device 0, where a call would make a context of half a GiB, and fails while a CUDA graph is captured.
"""

import ctypes
import logging
from typing import Any

import torch

logger = logging.getLogger("megatron_pp")

# cudaError_t and cudaStreamCaptureMode.
_SUCCESS, _NOT_READY = 0, 600
_RELAXED = 2


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
