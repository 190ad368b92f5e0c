"""Ways in which a rank of a test ends, or goes no further: on purpose, at any place in its code."""

from __future__ import annotations

import os
import signal
import sys


def fail(how: str) -> None:
    """``how``: raise, exit (``sys.exit``), os_exit, kill or stop, by a signal to this process."""
    if how == "raise":
        raise ValueError("injected fault")
    if how == "exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def as_in_the_foreground() -> None:
    """Of a process that is about to start (``preexec_fn``). What a shell starts in the background ignores Ctrl-C, and
    so does what that starts, tests among it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
