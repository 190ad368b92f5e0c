"""Handles an exception that is raised between two steps, if the work after a step is watched."""

import threading

from megatron_pp.faults.attach import GUARDS
from megatron_pp.faults.guard import FaultGuard
from megatron_pp.faults.position.tracker import Outside


def cause_between_steps(error: BaseException) -> BaseException:
    """The error to raise in place of ``error``, by the guards of this process; see ``ended_by``."""
    for guard, _ in GUARDS.items():
        found: BaseException = ended_by(guard, error)
        if found is not error:
            return found
    return error


def ended_by(guard: FaultGuard, error: BaseException) -> BaseException:
    """Handle ``error``, which was raised between steps, as in a step: an error of this rank's own is published, and for
    a failed transfer the cause is found. Returns the error to raise in its place; ``error`` itself if this rank is the
    cause."""
    after = guard.followed_by
    if not after or guard.over is not None or threading.get_ident() != guard.caller or guard.is_gone():
        return error
    traceback_of_it = error.__traceback__
    try:
        with guard.step(Outside(), phase=after):
            raise error
    except BaseException as found:
        error.__traceback__ = traceback_of_it
        return found
