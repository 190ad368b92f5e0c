"""Which process a rank is, and whether it still lives, as far as this machine can tell (Linux; elsewhere nothing is
claimed)."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from megatron_pp.faults.records import Process

ALIVE = "alive"
STOPPED = "stopped"  # SIGSTOP, a debugger, or a frozen container
DEAD = "dead"
UNKNOWN = "unknown"  # another machine, or no /proc


def this_process() -> Process:
    """The identity of the running process."""
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """The identity of a process of this machine; an empty one without /proc, or without that process."""
    try:
        found = _stat(pid)
    except OSError:
        found = None
    return Process(_host(), pid, found[1]) if found else Process()


def state_of(process: Process) -> str:
    """ALIVE, STOPPED, DEAD, or UNKNOWN where it is not a process of this machine."""
    if not process.host or process.host != _host():
        return UNKNOWN
    try:
        found = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return DEAD
    except OSError:
        return UNKNOWN
    if found is None:
        return UNKNOWN
    state, started = found
    if started != process.started or state in "ZXx":  # another process by now; or one that nobody has waited for
        return DEAD
    return STOPPED if state in "Tt" else ALIVE


@lru_cache(maxsize=1)
def _host() -> str:
    """Names this boot of this kernel and its process namespace: only there do pids mean the same. Empty without
    /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in clock ticks) of a process; None if the kernel tells it otherwise. Raises OSError
    without that process."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The command's name stands in parentheses and may itself contain any character.
    rest = text.rpartition(")")[2].split()
    return (rest[0], int(rest[19])) if len(rest) > 19 else None
