"""Decides whether the pipeline has stalled, and which ranks are the cause. All are functions of the known facts, so
that each rule can be tested.

While every heartbeat arrives and any rank has moved within ``timeout`` seconds, there is no stall. If no rank has
moved, it is a stall if all wait for each other, or if one has not entered the step. A rank that computes has until
``patience``, because a long operation looks like one that never ends. An exception are operations of several ranks that
wait for each other's messages (``mutual_waits.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp.faults.causes.liveness import DEAD, STOPPED, TRACED
from megatron_pp.faults.store.peers import Peer, Peers
from megatron_pp.faults.store.records import DONE, Process

StateOf = Callable[[Process], str]

# Seconds.
_WAIT_BEFORE_LOOKING = 1.0
_STORE_PATIENCE = 3.0
_CONNECTING = 20.0
_SILENCE_AFTER_FAILURE = 4.0
_FRESH = 10.0
_QUIET = 2.0  # time without a heartbeat, after which the rank looks up the process in /proc
_LOOKS_APART = 5.0  # if two looks are further apart, this rank was itself stopped
_READS_TO_BE_SURE = 3  # a rank is silent after so many reads of one heartbeat: this rank may itself have been stopped

STOPPED_SECONDS = 60.0
"""Time without a heartbeat, if the kernel says all that time that the process is stopped, as by SIGSTOP."""


@dataclass(frozen=True)
class Stall:
    """Why the step is given up, and the pipeline ranks that do not respond."""

    why: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnState:
    rank: int  # in the pipeline
    size: int
    step: int
    idle: float  # seconds since its position changed
    waits_on: tuple[int, ...] = ()  # ranks for which the current instruction waits; empty while it computes
    failed: str = ""  # the transfer of this rank that has failed, and how
    working: tuple[int, ...] = ()  # ranks, this one or others, that compute or run user code
    is_between: bool = False  # between steps, which may take any time
    mutual: tuple[str, tuple[int, ...]] = ("", ())  # operations that wait for each other's messages, and their ranks

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.size) if r != self.rank)


def find_stall(
    peers: Peers, own: OwnState, timeout: float, now: float, state_of: StateOf, patience: float | None = None
) -> Stall | None:
    """The first of these: a process that is gone; a store that does not answer; ranks without a heartbeat; no rank that
    moves. Between steps ranks may take any time while they send heartbeats, so the last one is not looked for, nor is a
    store that has ended. ``state_of``: see ``liveness``. ``patience``: for ranks that compute, by default ``timeout``.
    Times in seconds."""
    if own.is_between:
        return (
            _dead(peers, own, state_of)
            or _store_silent(peers, own, timeout, now)
            or _silent(peers, own, timeout, now, state_of)
        )
    return (
        _dead(peers, own, state_of)
        or _store_gone(peers, own, timeout, now)
        or _store_silent(peers, own, timeout, now)
        or _silent(peers, own, timeout, now, state_of)
        or _stuck(peers, own, timeout, now, timeout if patience is None else patience)
    )


def _dead(peers: Peers, own: OwnState, state_of: StateOf) -> Stall | None:
    """The stall if a process is gone. Only ranks that are waited for count: others may have finished and exited."""
    if peers.reading_since is None and peers.broken_since is None:
        return None  # peers are not read yet: an error could not say where the rank was
    awaited = own.others if own.failed else own.waits_on if own.idle >= _WAIT_BEFORE_LOOKING else ()
    gone = {}
    for r in awaited:
        seen, process = peers.seen.get(r), _process_of(peers, r)
        finished = seen is not None and seen.progress.step >= own.step and seen.progress.state == DONE
        if not finished and process is not None and state_of(process) == DEAD:
            gone[r] = f"rank {r} (pid {process.pid})"
    if not gone:
        return None
    why = f"the process of {', '.join(gone.values())} is gone"
    if peers.broken_since is not None:  # it may have ended because of that, which it could not publish
        why += f"; {_store_failed(peers)}"
    return Stall(why, tuple(gone))


def _store_gone(peers: Peers, own: OwnState, timeout: float, now: float) -> Stall | None:
    """The stall if the store has failed and this rank does not move: a failure of another rank would not reach it."""
    patience = min(timeout, _STORE_PATIENCE)
    broken = 0.0 if peers.broken_since is None else now - peers.broken_since
    if broken >= patience and (own.failed or own.idle >= patience):
        return Stall(_store_failed(peers))
    return None


def _store_failed(peers: Peers) -> str:
    host = "the process that holds it, by default global rank 0 or the launcher"
    return f"the store has failed ({peers.broken}); {host}, is gone"


def _store_silent(peers: Peers, own: OwnState, timeout: float, now: float) -> Stall | None:
    """The stall if the store does not answer and this rank does not move."""
    if own.failed:
        patience = min(timeout, _STORE_PATIENCE)
    else:
        patience = timeout if peers.connected else min(timeout, _CONNECTING)
    unanswered = 0.0 if peers.asked_at is None else now - peers.asked_at
    if unanswered >= patience and (own.failed or own.idle >= patience):
        host = "the process that holds it, by default global rank 0 or the launcher"
        return Stall(f"the store has not answered for {unanswered:.0f} s; {host}, is stopped, or the network is cut")
    return None


def ended(peers: Peers, state_of: StateOf) -> dict[int, str]:
    """Ranks, in words, that published that they were done and whose processes have ended since, by the end of the
    program or ``sys.exit``. This alone ends no step, but it is the cause of a failed transfer that has no other."""
    found = {}
    for r, seen in sorted(peers.seen.items()):
        process = _process_of(peers, r)
        if seen.progress.state == DONE and process is not None and state_of(process) == DEAD:
            found[r] = f"the program of rank {r} (pid {process.pid}) has ended after step {seen.progress.step}"
    return found


def _silent(peers: Peers, own: OwnState, timeout: float, now: float, state_of: StateOf) -> Stall | None:
    """The stall if ranks send no heartbeat. A stopped process sends none; nor does a healthy one whose code keeps the
    interpreter's lock, as a compilation in C++. For processes of this machine the kernel tells them apart."""
    patience = min(timeout, _SILENCE_AFTER_FAILURE) if own.failed else timeout
    quiet = {}
    for r, seen in sorted(peers.seen.items()):
        process, silent = _process_of(peers, r), _silent_for(seen, now)
        if seen.progress.state == DONE or silent < min(patience, _QUIET):
            peers.stopped.pop(r, None)
            continue
        state = "" if process is None else state_of(process)
        stopped = _stopped_for(peers, r, state, now)
        if silent >= patience or stopped >= _patience_with_stopped(timeout):
            pid = "process unknown" if process is None else f"pid {process.pid}"
            if state in (STOPPED, TRACED):
                pid += " is stopped, as by SIGSTOP or a debugger"
            quiet[r] = f"rank {r} ({pid}) for {silent:.0f} s"
    return Stall(f"no heartbeat from {', '.join(quiet.values())}", tuple(quiet)) if quiet else None


def _patience_with_stopped(timeout: float) -> float:
    """The time for which a rank may be stopped. With a longer ``timeout`` ranks may be stopped for longer."""
    return min(timeout, max(STOPPED_SECONDS, timeout / 8))


def _stopped_for(peers: Peers, rank: int, state: str, now: float) -> float:
    """Seconds for which every look has found the process of ``rank`` stopped. A debugger's stops are not counted: who
    looks at a rank in a debugger takes his time."""
    first, last = peers.stopped.pop(rank, (now, now))
    if state != STOPPED:
        return 0.0
    if now - last > _LOOKS_APART:
        first = now
    peers.stopped[rank] = first, now
    return now - first


def _stuck(peers: Peers, own: OwnState, timeout: float, now: float, patience: float) -> Stall | None:
    fresh = now - peers.read_at < min(timeout / 2, _FRESH)  # this rank may itself have been stopped for long
    if own.idle < timeout or peers.reading_since is None or not fresh:
        return None
    moved = [_moved_at(peers, r) for r in own.others]
    if any(at is None or now - at < timeout for at in moved):
        return None
    # A failed transfer may be why this rank does not move, but does not explain why another one does not.
    failed = f"; {own.failed}" if own.failed else ""
    absent = tuple(r for r in own.others if r not in peers.seen or peers.seen[r].progress.step < own.step)
    if absent:
        why = f"rank {', '.join(map(str, absent))} has not entered step {own.step}"
        if unknown := [str(r) for r in absent if r not in peers.seen]:
            why += f" (rank {', '.join(unknown)} has reported no step at all: it raised an error before its first, or "
            why += "runs without this engine: under Megatron every rank calls install(), else it gets 'Connection "
            why += "closed by peer')"
        return Stall(why + failed, absent)
    still = min(own.idle, *(now - at for at in moved if at is not None))
    operations, held = own.mutual
    if operations:
        return Stall(f"no rank has made progress for {still:.0f} s{failed}: {operations}", held)
    if own.working and still < patience:
        return None
    return Stall(f"no rank has made progress for {still:.0f} s{failed}")


def _process_of(peers: Peers, rank: int) -> Process | None:
    """The process that ``rank`` published."""
    if rank in peers.seen and peers.seen[rank].progress.process.pid:
        return peers.seen[rank].progress.process
    return peers.entries[rank].process if rank in peers.entries else None


def _silent_for(peer: Peer, now: float) -> float:
    """Seconds without a heartbeat; 0 until several reads found none."""
    return now - peer.beat_at if peer.reads_since >= _READS_TO_BE_SURE else 0.0


def _moved_at(peers: Peers, rank: int) -> float | None:
    """When the position of ``rank`` last changed, as far as this rank knows; None if it does not poll."""
    return peers.seen[rank].moved_at if rank in peers.seen else peers.reading_since
