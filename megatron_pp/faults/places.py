"""Where a rank is in its program, and whom it may wait for there."""

from collections.abc import Sequence
from typing import Protocol

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import NONE, Instruction
from megatron_pp.plan.ir.spec import Plan

_DEFERRED = 2  # sends that may be pending after their FREE, by default (config.max_pending_sends)


class Source(Protocol):
    """What is being executed, such as the engine's ``PlanExecutor``: ``position`` is the index of the current
    instruction; ``plan`` is None for work outside any plan."""

    @property
    def plan(self) -> Plan | None: ...

    @property
    def position(self) -> int: ...


def waits_on(at: Instruction) -> tuple[int, ...]:
    """Pipeline ranks that ``at`` may have to wait for: the peers of a transfer; empty for compute."""
    return tuple(sorted({one.peer for one in ins.each([at]) if one.peer != NONE}))


def pending_peers(program: Sequence[Instruction], done: int, issued: int) -> set[int]:
    """Peers of the transfers that were posted up to position ``issued`` and may not be over on a device that is at
    ``done``. A FREE may leave its send pending, so the sends that were freed last count too."""
    earlier = list(ins.each(program[:done]))
    freed_last = [at for at in earlier if at.op in ins.FREE_OPS][-_DEFERRED:]
    over = {at._replace(op=ins.POST_OF[at.op]) for at in earlier if at.op in ins.POST_OF and at not in freed_last}
    return {at.peer for at in ins.each(program[: issued + 1]) if at.op in ins.POST_OPS and at not in over}


def instruction_at(plan: Plan, rank: int, position: int) -> Instruction | None:
    """The instruction at ``position`` of ``rank``'s program; None beyond its ends."""
    program = plan.programs[rank] if 0 <= rank < len(plan.programs) else ()
    return program[position] if 0 <= position < len(program) else None
