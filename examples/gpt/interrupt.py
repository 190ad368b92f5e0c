"""Ctrl-C and SIGTERM: the first asks for an end at the next step boundary, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import Any

IMPATIENT_AFTER = 3.0
"""Seconds after which another signal means now. ``torchrun`` passes on the Ctrl-C that the terminal has sent to all
processes already, so two in quick succession are one request."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """After ``begin`` the first SIGINT or SIGTERM is noted in ``first``; one IMPATIENT_AFTER that ends the process.

    A process that left on its own would leave its peers without a partner in the middle of a step. So the ranks
    exchange their requests at a step's end, and all leave after the same one. Python runs signal handlers in the main
    thread only, which a transfer may block; so a thread of its own ends the process."""

    first: signal.Signals | None = None
    granted = False  # the process is ending as requested: further signals change nothing
    _previous: dict[signal.Signals, Any] | None = None

    def __enter__(self) -> StopRequest:
        return self

    def begin(self) -> None:
        """From here on signals are noted."""
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="megatron_pp signals").start()
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def __exit__(self, *_: Any) -> None:
        if self._previous is None:
            return
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()  # which ends the thread

    def _note(self, number: int, frame: Any) -> None:
        self.first = self.first or signal.Signals(number)

    def _watch(self, reader: socket.socket) -> None:
        """Each byte is the number of a signal that came."""
        since: float | None = None
        with reader:
            while received := reader.recv(1):
                if received[0] not in _SIGNALS or self.granted:
                    continue
                since = since or time.monotonic()
                if time.monotonic() - since > IMPATIENT_AFTER:
                    name = signal.Signals(received[0]).name
                    print(f"train.py: {name} again: ended at once", file=sys.stderr, flush=True)
                    os._exit(128 + received[0])
