"""A rank's position for errors: in words, and with the ranks for which it may be waiting."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pp.faults.causes import diagnosis
from megatron_pp.faults.position.places import Place, waits_on
from megatron_pp.faults.position.tracker import Tracker
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction

_DEFERRED = 2  # sends that may be pending after their FREE, by default (config.max_pending_sends)


def awaited_ranks(tracker: Tracker) -> tuple[int, ...]:
    """Pipeline ranks for which this rank may be waiting: the peers of a transfer; outside the plan all others; none
    while it computes. If the host runs ahead, also the peers of all transfers that may be pending: these may block
    compute that is behind them in one hardware queue."""
    where = tracker.where()
    if where is None:
        return ()
    at = tracker.instruction(where)
    if at is None:
        return tuple(r for r in range(tracker.size) if r != tracker.rank)
    if tracker.completed is None or where.plan is None:
        return waits_on(at)
    source, program = tracker.source, where.plan.programs[tracker.rank]
    is_here = source is not None and source.plan is where.plan and where.step == tracker.step
    issued = source.position if source is not None and is_here else len(program)
    return tuple(sorted({*waits_on(at), *pending_peers(program, where.position, issued)}))


def pending_peers(program: Sequence[Instruction], done: int, issued: int) -> set[int]:
    """Peers of the transfers that were posted up to position ``issued`` and may not be over on a device that is at
    ``done``. A FREE may leave its send pending, so the sends that were freed last count too."""
    earlier = list(ins.each(program[:done]))
    freed_last = [at for at in earlier if at.op in ins.FREE_OPS][-_DEFERRED:]
    over = {at._replace(op=ins.POST_OF[at.op]) for at in earlier if at.op in ins.POST_OF and at not in freed_last}
    return {at.peer for at in ins.each(program[: issued + 1]) if at.op in ins.POST_OPS and at not in over}


def within_plans(tracker: Tracker) -> list[Place]:
    """The places of the device and of the host, which may be a step ahead, as far as they are within plans."""
    return [place for place in (tracker.where(), tracker.of_host()) if place is not None and place.plan is not None]


def described(tracker: Tracker, of_host: bool = False) -> tuple[str, str]:
    """The current instruction as printed and in words. Outside the plan "", and what this rank does. ``of_host``: the
    position of the host, even if the device is behind it."""
    where = tracker.of_host() if of_host else tracker.where()
    at = tracker.instruction(where)
    if at is not None:
        return str(at), at.name
    if tracker.is_entering:
        return "", "the entry of the step"
    if where is not None and where.plan is not None and where.position < 0 and not where.phase:
        return "", "the beginning of the step, before its first instruction (channels, no_sync_func)"
    return "", (where.phase if where else "") or "the step"


def doing(tracker: Tracker) -> str:
    """What this rank does now, as a clause: ``rank 2 waits for ...``."""
    at = tracker.instruction(tracker.where())
    return f"rank {tracker.rank} {f'is in {described(tracker)[1]}' if at is None else diagnosis.doing(at)}"
