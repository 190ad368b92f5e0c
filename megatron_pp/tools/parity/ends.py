"""How a run, or a process of it, ended: an error, and words. Without torch, for the command and its keeper."""

from __future__ import annotations

import contextlib
import signal

from megatron_pp.errors import MegatronPPError


class RunError(MegatronPPError, RuntimeError):
    """A run that a comparison needs did not end: a rank raised, died, or missed the deadline."""


def ended_in_words(code: int | None) -> str:
    """How a process ended, from its exit code; a negative one is that of a signal."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
