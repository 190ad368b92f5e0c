"""Whether the pipeline has stalled, and who is to blame: pure functions of what is known, so that each rule can be
tested.

A rank that is slow is not at fault: as long as anybody moves, or for ``timeout`` seconds nobody does, and as long as
each gives signs of life, there is nothing to report. Where nobody moves for longer, it is a stall if all wait for each
other, and if somebody has not even come to the step; but a rank that computes may take longer, as long as its process
lives, until ``patience`` is over: nobody can tell a long operation from one that never ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp.faults.liveness import DEAD, STOPPED
from megatron_pp.faults.peers import View
from megatron_pp.faults.records import DONE, Process

StateOf = Callable[[Process], str]

# Seconds.
_WAIT_BEFORE_LOOKING = 1.0
_STORE_PATIENCE = 3.0
_SILENCE_AFTER_FAILURE = 4.0
_FRESH = 10.0


@dataclass(frozen=True)
class Finding:
    """Why the step is given up, and the pipeline ranks that do not answer."""

    why: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True)
class Own:
    """This rank.

    rank, size  in the pipeline
    step        its step number
    idle        seconds since it moved
    waits_on    pipeline ranks whose message the current instruction waits for; empty while it computes
    failed      which of its transfers has failed, and how; "" if none has
    working     ranks, this one or others, that are in work of their own
    """

    rank: int
    size: int
    step: int
    idle: float
    waits_on: tuple[int, ...] = ()
    failed: str = ""
    working: tuple[int, ...] = ()

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.size) if r != self.rank)


def judge(
    view: View, own: Own, timeout: float, now: float, state_of: StateOf, patience: float | None = None
) -> Finding | None:
    """The first of: a process that is gone; a store that does not answer; ranks that are silent; nobody moving. None
    while all is well.

    ``state_of`` tells a process' state (``liveness.state_of``); ``patience`` (by default as long as ``timeout``) is for
    ranks that compute. Times in seconds.
    """
    return (
        _dead(view, own, state_of)
        or _store_gone(view, own, timeout, now)
        or _silent(view, own, timeout, now, state_of)
        or _stuck(view, own, timeout, now, timeout if patience is None else patience)
    )


def _dead(view: View, own: Own, state_of: StateOf) -> Finding | None:
    """A rank that has finished may go, and may do so before it has said that it finished; so only who is waited for
    counts."""
    if view.reading_since is None and view.broken_since is None:
        return None  # who it is would be known, but not where it was
    asked = own.others if own.failed else own.waits_on if own.idle >= _WAIT_BEFORE_LOOKING else ()
    gone = [
        (r, p)
        for r in asked
        if not _has_finished(view, r, own.step) and (p := view.process_of(r)) is not None and state_of(p) == DEAD
    ]
    if not gone:
        return None
    names = ", ".join(f"rank {r} (pid {p.pid})" for r, p in gone)
    return Finding(f"the process of {names} is gone", tuple(r for r, _ in gone))


def _has_finished(view: View, rank: int, step: int) -> bool:
    seen = view.seen.get(rank)
    return seen is not None and seen.progress.step >= step and seen.progress.state == DONE


def _store_gone(view: View, own: Own, timeout: float, now: float) -> Finding | None:
    """A store that is gone matters to a rank that does not move: the failure that it waits for can not reach it any
    more."""
    patience = min(timeout, _STORE_PATIENCE)
    broken = 0.0 if view.broken_since is None else now - view.broken_since
    if broken >= patience and (own.failed or own.idle >= patience):
        return Finding(
            f"the store does not work any more ({view.broken}); the process that holds it, by default global rank 0 or "
            "the launcher, is gone"
        )
    patience = min(timeout, _STORE_PATIENCE) if own.failed else timeout
    unanswered = 0.0 if view.asked_at is None else now - view.asked_at
    if unanswered >= patience and (own.failed or own.idle >= patience):
        return Finding(
            f"the store has not answered for {unanswered:.0f} s; the network to the process that holds it is cut"
        )
    return None


def _silent(view: View, own: Own, timeout: float, now: float, state_of: StateOf) -> Finding | None:
    patience = min(timeout, _SILENCE_AFTER_FAILURE) if own.failed else timeout
    quiet = {
        r: seen.silent_for(now)
        for r, seen in view.seen.items()
        if seen.progress.state != DONE and seen.silent_for(now) >= patience
    }
    if not quiet:
        return None
    told = ", ".join(
        f"rank {r} ({_how(view, r, state_of)}) for {seconds:.0f} s" for r, seconds in sorted(quiet.items())
    )
    return Finding(f"no sign of life from {told}", tuple(sorted(quiet)))


def _how(view: View, rank: int, state_of: StateOf) -> str:
    process = view.process_of(rank)
    if process is None:
        return "process unknown"
    if state_of(process) == STOPPED:
        return f"pid {process.pid} is stopped, as by SIGSTOP or a debugger"
    return f"pid {process.pid}"


def _stuck(view: View, own: Own, timeout: float, now: float, patience: float) -> Finding | None:
    fresh = now - view.read_at < min(timeout / 2, _FRESH)  # this rank may itself have been stopped for long
    if own.idle < timeout or view.reading_since is None or not fresh:
        return None
    moved = [view.moved_at(r) for r in own.others]
    if any(at is None or now - at < timeout for at in moved):
        return None
    absent = tuple(r for r in own.others if r not in view.seen or view.seen[r].progress.step < own.step)
    if absent:
        names = ", ".join(map(str, absent))
        return Finding(_unexplained(f"rank {names} has not entered step {own.step}", own), absent)
    still = min(own.idle, *(now - at for at in moved if at is not None))
    if own.working and still < patience:
        return None
    return Finding(_unexplained(f"no rank has moved for {still:.0f} s", own))


def _unexplained(why: str, own: Own) -> str:
    """A rank that stands still may be so because of a failed transfer, but does not explain one."""
    return f"{why}; {own.failed}" if own.failed else why
