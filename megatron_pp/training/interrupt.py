"""Ctrl-C and SIGTERM as a wish that is granted at the next step boundary."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

IMPATIENT_AFTER = 3.0
"""Seconds after which another signal means now. ``torchrun`` passes on the Ctrl-C that the terminal has sent to all
processes
already, so two in quick succession are one wish."""


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is noted instead of ending the process; a later one ends it at once.

    A process that leaves on its own while its peers are in the middle of a step would leave them hanging. So each notes
    the wish, they agree at a step's end (see ``loop.py``), and all leave after the same step.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_name is None:
            self.signal_name, self._since = signal.Signals(number).name, now
        elif now - self._since > IMPATIENT_AFTER:
            raise KeyboardInterrupt(f"{signal.Signals(number).name} again")
