"""CUDA events that are recorded again and again, as making one takes longer than recording it."""

from typing import Any

import torch


class EventPool:
    """Of one rank; any thread may give back, one records. ``timing``: whether times between them are asked for."""

    def __init__(self, timing: bool = False) -> None:
        self._kind = {"enable_timing": True} if timing else {}
        self._free: list[Any] = []

    def record(self, stream: Any = None) -> Any:
        """An event behind all that was issued to ``stream``, by default the current one."""
        event = self._free.pop() if self._free else torch.cuda.Event(**self._kind)
        event.record(stream)
        return event

    def give_back(self, event: Any) -> None:
        """Nothing asks ``event`` again, nor will wait for it. Streams that were made to wait for it keep waiting for
        what it was recorded behind then (``cudaStreamWaitEvent``)."""
        self._free.append(event)

    def order(self, first: Any, then: Any) -> None:
        """Stream ``then`` waits for what was issued to ``first``; ``then.wait_stream(first)`` makes an event."""
        event = self.record(first)
        then.wait_event(event)
        self.give_back(event)
