"""A rank's place in its program, and the ranks for which it may wait there."""

from typing import NamedTuple, Protocol

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import NONE, Instruction
from megatron_pp.plan.ir.spec import Plan


class Source(Protocol):
    """The work that is being executed, such as the engine's ``PlanExecutor``. ``position`` is the index of the current
    instruction; ``plan`` is None for work outside any plan."""

    @property
    def plan(self) -> Plan | None: ...

    @property
    def position(self) -> int: ...


class Place(NamedTuple):
    """A place in a step: a position in the program of ``plan``, or with ``phase``, in words, outside of it."""

    step: int
    plan: Plan | None
    position: int
    phase: str


def waits_on(at: Instruction) -> tuple[int, ...]:
    """Pipeline ranks for which ``at`` may have to wait: the peers of a transfer; none for compute."""
    return tuple(sorted({one.peer for one in ins.each([at]) if one.peer != NONE}))


def instruction_at(plan: Plan, rank: int, position: int) -> Instruction | None:
    """The instruction at ``position`` of ``rank``'s program; None beyond its ends."""
    program = plan.programs[rank] if 0 <= rank < len(plan.programs) else ()
    return program[position] if 0 <= position < len(program) else None
