"""What torch's own watchdog does where NCCL fails, and how it leaves that to the fault guard.

Read in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (to be run on GPUs). By default, when a peer is gone or an
operation has taken longer than the group's timeout, torch's watchdog thread waits for a minute, in which every new
operation of that group blocks, and then ends the process (``TORCH_NCCL_ASYNC_ERROR_HANDLING=3``). The minute is four
times ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC``, with any error handling. A guard that aborts the communicators first, as
it does where a rank raised, was killed or stopped, keeps the watchdog quiet; but where NCCL itself notices first, a
rank may be ended, or be blocked for that minute, before it can say why. ``TORCH_NCCL_DUMP_ON_TIMEOUT`` makes all ranks'
monitor threads leave off their work for eight minutes, which ``destroy_process_group`` waits for.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Under these the guard's errors come first on all ranks, and the program can go on with new groups."""


def leave_failures_to_the_guard(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set. torch reads them when a group is made: call it before ``init_process_group``."""
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)


def warning(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """A sentence for the log, where torch will end the process; None where it will not."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if environ.get(name, "3") == SETTINGS[name]:
        return None
    settings = " ".join(f"{key}={value}" for key, value in SETTINGS.items())
    now = environ.get(name, "not set, which means 3")
    return (
        f"{name} is {now}: where NCCL fails, torch may end this process before it can say which rank failed and where; "
        f"set {settings} before the process groups are made"
    )
