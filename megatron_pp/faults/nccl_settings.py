"""Settings by which torch's own watchdog leaves failures of NCCL to the fault guard.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; run by two ranks that share a GPU. By default, when a peer is
gone or an operation has exceeded the group's timeout, torch's watchdog blocks every new operation of that group for
four times ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC``, a minute, and then ends the process
(``TORCH_NCCL_ASYNC_ERROR_HANDLING=3``).
If the guard aborts the communicators first (a rank raised, was killed or stopped), this does not happen. If NCCL
detects the failure first, a rank may be ended or blocked before it can report the cause. ``TORCH_NCCL_DUMP_ON_TIMEOUT``
makes all ranks' monitor threads pause for eight minutes, and ``destroy_process_group`` waits for them.
"""

import os
from collections.abc import MutableMapping

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""With these the guard's errors come first on all ranks, and the program can continue with new groups."""


def leave_failures_to_the_guard(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the user has not set. torch reads them when a group is made, so call this before
    ``init_process_group``."""
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)


def warning(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """A log message if torch will end the process when NCCL fails; None if it will not."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if environ.get(name, "3") == SETTINGS[name]:
        return None
    settings = " ".join(f"{key}={value}" for key, value in SETTINGS.items())
    now = environ.get(name, "not set, which means 3")
    return (
        f"{name} is {now}: when NCCL fails, torch may end this process before it can report which rank failed and "
        f"where; set {settings} before the process groups are made"
    )
