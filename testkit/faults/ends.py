"""Ways in which a test's rank ends or stops, on purpose, at any place in its code."""

from __future__ import annotations

import os
import signal
import sys


def fail(how: str) -> None:
    """Fail in the way ``how``: raise, exit (``sys.exit``), os_exit, or kill or stop by a signal to this process."""
    if how == "raise":
        raise ValueError("injected fault")
    if how == "exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def as_in_the_foreground() -> None:
    """Make a process that is about to start (``preexec_fn``) react to Ctrl-C. Processes that a shell starts in the
    background ignore it, and so do their children, also tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
