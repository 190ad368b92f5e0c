"""Which process a rank is, and whether it is alive, as far as this machine can determine (Linux only)."""

import os
from functools import lru_cache
from pathlib import Path

from megatron_pp.faults.records import Process

ALIVE = "alive"
STOPPED = "stopped"  # by SIGSTOP or the terminal
TRACED = "traced"  # a debugger holds it
DEAD = "dead"
UNKNOWN = "unknown"  # another machine, or no /proc


def this_process() -> Process:
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """The identity of a process of this machine; an empty one without /proc, or without that process."""
    try:
        return Process(_host(), pid, _stat(pid)[1])
    except OSError:
        return Process()


def state_of(process: Process) -> str:
    """ALIVE, STOPPED, TRACED, DEAD, or UNKNOWN where it is not a process of this machine."""
    if not process.host or process.host != _host():
        return UNKNOWN
    try:
        state, started = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return DEAD
    except OSError:
        return UNKNOWN
    if started != process.started or state in "ZXx":  # the pid is reused, or it is a zombie
        return DEAD
    return {"T": STOPPED, "t": TRACED}.get(state, ALIVE)


@lru_cache(maxsize=1)
def _host() -> str:
    """This boot of this kernel and its process namespace: only there do pids mean the same. Empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int]:
    """(state letter, start time in clock ticks) of a process. Raises OSError without it, or in an unknown format."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The command's name is in parentheses and may itself contain any character.
    rest = text.rpartition(")")[2].split()
    if len(rest) <= 19:
        raise OSError(f"/proc/{pid}/stat has an unknown format")
    return rest[0], int(rest[19])
