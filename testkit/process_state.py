"""What a test may not leave changed in the process that it shares with later tests.

A worker runs thousands of tests, in an order that depends on how fast the other workers are. What one test leaves
behind changes the result of another one, in some orders. `changes` names it, so that the test that left it fails.

Left out is what libraries change for good when they are imported or used: torch's hook for uncaught exceptions in a
process with process groups, the folders that Megatron-core adds to `sys.path`, variables such as
TORCHINDUCTOR_CACHE_DIR.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

LOGGERS = (None, "megatron_pp")  # None: the root
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
OF_PYTEST = "PYTEST_CURRENT_TEST"
VARIABLE = "environment variable "
SET_BY_TESTS = ("MEGATRON_PP", "MASTER_", "NCCL_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_", "TORCH_NCCL_")
"""A new environment variable of such a name was left by a test, and not by a library."""


def values() -> dict[str, object]:
    """The state of this process, by the names that a message gives to its parts."""
    found = {f"{VARIABLE}{name}": value for name, value in os.environ.items() if name != OF_PYTEST}
    handlers = {f"handler of {one.name}": signal.getsignal(one) for one in SIGNALS}
    return {**found, **handlers, **dict(_of_logging()), **dict(_of_torch()), "current folder": os.getcwd()}


def _of_logging() -> Iterator[tuple[str, object]]:
    yield "logging.disable()", logging.root.manager.disable
    for name in LOGGERS:
        logger = logging.getLogger(name)
        yield f"level of logger {logger.name}", logger.level
        yield f"logger {logger.name} disabled", logger.disabled
        yield f"logger {logger.name} propagates", logger.propagate
        yield f"filters of logger {logger.name}", list(logger.filters)
        # pytest puts handlers of its own into the root logger for each phase of a test.
        handlers = [one for one in logger.handlers if not type(one).__module__.startswith("_pytest")]
        yield f"handlers of logger {logger.name}", handlers


def _of_torch() -> Iterator[tuple[str, object]]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    yield "torch's default dtype", torch.get_default_dtype()
    yield "torch's default device", torch.get_default_device()
    yield "torch's number of threads", torch.get_num_threads()
    yield "torch's recording of gradients", torch.is_grad_enabled()
    yield "torch's deterministic algorithms", torch.are_deterministic_algorithms_enabled()


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """What differs, one line each. What is new is a change only where `SET_BY_TESTS` names it: torch, for example, may
    have been imported in between."""
    left_by_tests = tuple(f"{VARIABLE}{name}" for name in SET_BY_TESTS)
    found = []
    for name in sorted({*before, *after}):
        was, now = before.get(name), after.get(name)
        if was != now and (name in before or name.startswith(left_by_tests)):
            found.append(f"{name} was {was!r} and is {now!r}")
    return found
