"""The identity of a rank's process, by which other ranks of this machine can find it (Linux only)."""

import os
from functools import lru_cache
from pathlib import Path

from megatron_pp.faults.store.records import Process


def this_process() -> Process:
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """The identity of a process of this machine; an empty one without /proc, or without that process."""
    try:
        return Process(this_host(), pid, stat_of(pid)[1])
    except OSError:
        return Process()


@lru_cache(maxsize=1)
def this_host() -> str:
    """The name of this boot of the kernel and its process namespace, in which a pid is unique. Empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def stat_of(pid: int) -> tuple[str, int]:
    """(state letter, start time in clock ticks) of a process. Raises OSError without it, or in an unknown format."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The command's name is in parentheses and may itself contain any character.
    rest = text.rpartition(")")[2].split()
    if len(rest) <= 19:
        raise OSError(f"/proc/{pid}/stat has an unknown format")
    return rest[0], int(rest[19])
