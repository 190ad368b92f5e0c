"""The error of a failed run, and the end of a process in words. It imports no torch, for the command and its keeper."""

from __future__ import annotations

import contextlib
import signal

from megatron_pp.errors import MegatronPPError


class RunError(MegatronPPError, RuntimeError):
    """A run that a comparison needs has failed: a rank raised, died, or missed the deadline."""


def ended_in_words(code: int | None) -> str:
    """The end of a process in words, from its exit code. A negative code is the number of a signal."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
