"""Ctrl-C and SIGTERM as a wish that is granted at the next step boundary, and as an order when it comes again."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

IMPATIENT_AFTER = 3.0
"""Seconds after which another signal means now. ``torchrun`` passes on the Ctrl-C that the terminal has sent to all
processes already, so two in quick succession are one wish."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Seconds that the main thread is given to end by itself.
_UNTIL_FORCED = 2.0


class StoppedAtOnceError(KeyboardInterrupt):
    """A second signal: the process ends in the middle of a step. ``number`` is the signal's."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} again")
        self.number = number


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is noted instead of ending the process; a later one ends it at once.

    A process that leaves on its own while its peers are in the middle of a step would leave them without a partner. So
    each notes the wish, they agree at a step's end (see ``trainer.py``), and all leave after the same step.

    Python runs signal handlers between two instructions of the main thread, which may be blocked in a transfer for as
    long as a peer is stopped. A thread of its own therefore sees to it that the second signal ends the process.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._since = 0.0
        self._granted = False
        self._left = threading.Event()
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._bytes: tuple[socket.socket, socket.socket] | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.first is not None

    def wishes(self) -> list[float]:
        """For each signal that is a wish, 1 if it has come to this process, else 0; ``granted`` reads the sums."""
        return [float(self.first is number) for number in _SIGNALS]

    def grant(self) -> None:
        """The process is ending as was wished: what still comes changes nothing."""
        self._granted = True

    def __enter__(self) -> StopRequest:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._bytes = reader, writer
        self._previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._stand_by, args=(reader,), daemon=True, name="megatron_pp signals").start()
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_fd)
        assert self._bytes is not None
        self._bytes[1].close()  # which ends the thread

    def _note(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two instructions: where it was blocked, later than the signal came."""
        if self._granted:
            return  # torchrun, for one, tells the ranks that still write when the first has left
        if self.first is None:
            self.first, self._since = signal.Signals(number), time.monotonic()
        elif self._is_an_order(self._since):
            raise StoppedAtOnceError(signal.Signals(number))

    def _is_an_order(self, since: float) -> bool:
        """Whether a signal now is one after another at ``since``."""
        return not self._granted and time.monotonic() - since > IMPATIENT_AFTER

    def _stand_by(self, reader: socket.socket) -> None:
        """In a thread that is never blocked: each byte is the number of a signal that came."""
        since: float | None = None
        with reader:
            while received := reader.recv(1):
                if received[0] not in _SIGNALS:
                    continue
                if since is None:
                    since = time.monotonic()
                elif self._is_an_order(since) and not self._left.wait(_UNTIL_FORCED):
                    name = signal.Signals(received[0]).name
                    print(f"train.py: {name} again: ended amid a transfer", file=sys.stderr, flush=True)
                    os._exit(128 + received[0])


def granted(wishes: Sequence[float]) -> signal.Signals | None:
    """The signal on which all ranks stop, from the sums of their ``wishes``; ``None`` to go on."""
    came = [number for number, ranks in zip(_SIGNALS, wishes, strict=True) if ranks > 0]
    return came[-1] if came else None
