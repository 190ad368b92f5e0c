"""Says in words why ranks wait for each other."""

from typing import Any

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import RENDEZVOUS
from megatron_pp.plan.verify.queues import DATA, End, Entry


def cycle_in_words(run: Any, rank: int) -> str:
    """Which rank waits for which, from ``rank`` on until a rank comes up again or does not wait. ``run``: the stopped
    run of ``rendezvous.py``."""
    seen: list[int] = []
    lines: list[str] = []
    current = rank
    while current not in seen:
        seen.append(current)
        entry = run.blocked.get(current)
        if entry is None:
            lines.append(f"rank {current} is at its end")
            break
        head = next(e for e in entry.queue[0].ends if not e.done)  # the end that has no partner
        other = "collective" if head.is_collective else "receive" if head.is_send else "send"
        peer = run.queues.missing_peer(head)
        lines.append(
            f"rank {current} waits at {_held_at(run, current)} for rank {peer} to post the {other} that "
            f"matches {head.at}{_queued(run, current, entry, head)}"
        )
        current = peer
    start = seen.index(current) if current in seen else 0
    return f"deadlock under {' and '.join(run.rules or [RENDEZVOUS])}: {'; '.join(lines[start:])}"


def _held_at(run: Any, rank: int) -> str:
    at = run.plan.programs[rank][run.at[rank]]
    if at.op in ins.COMPUTE_OPS and run.device_sync:
        return f"{at}, which synchronises the device,"
    return f"{at}, which may wait for the device," if _waits_for_device(run, rank) else str(at)


def _waits_for_device(run: Any, rank: int) -> bool:
    """Whether the rank waits before its instruction for all that it has posted."""
    if not run.any_wait:
        return False
    at = run.plan.programs[rank][run.at[rank]]
    own = run.posted[rank].get((ins.POST_OF.get(at.op, at.op), at[1:], DATA))
    return own is None or (at.op in ins.POST_OF and run.blocked[rank] is not own)


def _queued(run: Any, rank: int, entry: Entry, head: End) -> str:
    """The words that an instruction of the rank is behind ``head`` in its queue; empty if it is ``head`` itself."""
    at = run.plan.programs[rank][run.at[rank]]
    if (at.op in ins.POST_OPS or at.op in ins.GROUP_OPS) and not _waits_for_device(run, rank):
        return "" if head.entry.at is at else f" (its {at} is queued behind it, and all that follows behind that)"
    return "" if head.entry is entry else f" (its {entry.at} is queued behind it)"
