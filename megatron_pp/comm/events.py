"""CUDA events that are recorded again and again, because making one takes longer than recording it."""

from typing import Any

import torch


class EventPool:
    """The events of one rank. One thread records; any thread may give back. ``timing``: events measure times."""

    def __init__(self, timing: bool = False) -> None:
        self._kind = {"enable_timing": True} if timing else {}
        self._free: list[Any] = []

    def record(self, stream: Any = None) -> Any:
        """Record an event behind all that was issued to ``stream``, by default the current one."""
        event = self._free.pop() if self._free else torch.cuda.Event(**self._kind)
        event.record(stream)
        return event

    def give_back(self, event: Any) -> None:
        """Return ``event`` to the pool; the caller must not use it again. Streams that were made to wait for it still
        wait for what it was recorded behind at that time (``cudaStreamWaitEvent``)."""
        self._free.append(event)

    def order(self, first: Any, then: Any) -> None:
        """Let stream ``then`` wait for what was issued to ``first``. ``then.wait_stream(first)`` makes an event."""
        event = self.record(first)
        then.wait_event(event)
        self.give_back(event)
