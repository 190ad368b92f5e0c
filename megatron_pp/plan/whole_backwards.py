"""A plan without W, for a model that does all of each backward in one.

Communication stays as it is, so that ranks with and without W can run one schedule together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_pp.plan.instruction import BACKWARD, BACKWARD_OPS, ENABLE_GRAD_SYNC, INPUT_GRAD, WEIGHT_GRAD, Instruction
from megatron_pp.plan.spec import Plan


def with_whole_backwards(plan: Plan) -> Plan:
    """``plan`` with B in place of I, without W, and without the syncs that wait for a W."""
    programs, orders = (tuple(map(_whole, lines)) for lines in (plan.programs, plan.orders))
    return replace(plan, spec=replace(plan.spec, split_backward=False), programs=programs, orders=orders)


def _whole(program: Sequence[Instruction]) -> tuple[Instruction, ...]:
    last = {at.chunk: k for k, entry in enumerate(program) for at in entry.members or (entry,) if at.op in BACKWARD_OPS}
    return tuple(
        at._replace(op=BACKWARD) if at.op == INPUT_GRAD else at
        for k, at in enumerate(program)
        if at.op != WEIGHT_GRAD and not (at.op == ENABLE_GRAD_SYNC and k > last.get(at.chunk, k))
    )
