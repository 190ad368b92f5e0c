"""Tells whether the process of a rank is alive, as far as this machine can know (Linux only)."""

from megatron_pp.faults.store.processes import stat_of, this_host
from megatron_pp.faults.store.records import Process

ALIVE = "alive"
STOPPED = "stopped"  # by SIGSTOP or the terminal
TRACED = "traced"  # a debugger holds it
DEAD = "dead"
UNKNOWN = "unknown"  # another machine, or no /proc


def state_of(process: Process) -> str:
    """ALIVE, STOPPED, TRACED or DEAD; UNKNOWN if it is not a process of this machine."""
    if not process.host or process.host != this_host():
        return UNKNOWN
    try:
        state, started = stat_of(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return DEAD
    except OSError:
        return UNKNOWN
    if started != process.started or state in "ZXx":  # the pid is reused, or it is a zombie
        return DEAD
    return {"T": STOPPED, "t": TRACED}.get(state, ALIVE)
