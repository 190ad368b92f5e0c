"""A plan without W, for a model that does all of each backward in B.

Communication stays as it is, so that ranks with and without W can run one schedule together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_pp.plan.instruction import BACKWARD, GRAD_ENABLE, WEIGHT, Instruction
from megatron_pp.plan.spec import Plan


def with_whole_backwards(plan: Plan) -> Plan:
    """``plan`` without W, and without the marks that wait for one."""
    programs, orders = (tuple(map(_whole, lines)) for lines in (plan.programs, plan.orders))
    return replace(plan, spec=replace(plan.spec, split_backward=False), programs=programs, orders=orders)


def _whole(program: Sequence[Instruction]) -> tuple[Instruction, ...]:
    last = {at.chunk: k for k, at in enumerate(program) if at.op == BACKWARD}
    return tuple(
        at
        for k, at in enumerate(program)
        if at.op != WEIGHT and not (at.op == GRAD_ENABLE and k > last.get(at.chunk, k))
    )
