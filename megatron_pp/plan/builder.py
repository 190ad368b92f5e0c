"""Build, verify and cache plans: a training step only executes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from megatron_pp.errors import PlanError
from megatron_pp.plan.bounded_cache import BoundedCache
from megatron_pp.plan.family import Announce, Family
from megatron_pp.plan.instruction import (
    BACKWARD,
    BACKWARD_OPS,
    ENABLE_GRAD_SYNC,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Instruction,
    each,
)
from megatron_pp.plan.lower import lowered
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.schedule_file import find_family
from megatron_pp.plan.spec import Plan, PlanSpec
from megatron_pp.plan.verifier import Verdict, verify

_PLANS: BoundedCache[PlanSpec, tuple[Plan, Verdict]] = BoundedCache(256 << 20, least=2)  # training and evaluation
_BUILDING = threading.RLock()  # ranks that are threads of one process build a plan once
_INSTRUCTION = 136  # bytes of an instruction and the pointer to it


def build_plan(spec: PlanSpec, announce: Announce | None = None) -> Plan:
    """The plan of ``spec``, verified. The same spec gives the same object.

    Raises PlanError for an unknown schedule, a number of chunks the schedule cannot have, or a plan that ``verify``
    refuses. ``announce`` is given a sentence where a search for the plan takes long.
    """
    return verified_plan(spec, announce)[0]


def verified_plan(spec: PlanSpec, announce: Announce | None = None) -> tuple[Plan, Verdict]:
    """The plan and what ``verify`` found: the peaks of memory on every rank."""
    found = _PLANS.get(spec)
    if found is not None:
        return found
    with _BUILDING:
        found = _PLANS.get(spec)
        if found is None:
            plan = lowered_plan(spec, announce)
            found = _PLANS.put(spec, (plan, verify(plan)), _size(plan))
        return found


def forget_plans() -> None:
    """Empty the cache."""
    _PLANS.clear()


def _size(plan: Plan) -> int:
    return _INSTRUCTION * sum(1 for program in (*plan.programs, *plan.orders) for _ in each(program))


def lowered_plan(spec: PlanSpec, announce: Announce | None = None) -> Plan:
    """The plan of ``spec`` before it is verified."""
    if not spec.split_backward:
        return with_whole_backwards(lowered_plan(replace(spec, split_backward=True), announce))
    family = family_of(spec)
    placement = Placement(family.placement, spec.pipeline_size, spec.num_chunks)
    orders = family.orders(spec.shape) if family.search is None else family.search(spec, announce)
    remark = family.remark(spec.shape)
    programs = family.programs(spec) if family.programs is not None else None
    if programs is not None:
        return Plan(spec, placement, programs, tuple(map(placement.place, count(), orders)), remark)
    try:
        return lowered(spec, placement, orders, remark)
    except PlanError as error:
        if not family.digest:
            raise
        raise type(error)(f"{family.name}: {error}") from error


def with_whole_backwards(plan: Plan) -> Plan:
    """``plan`` for a model that does all of each backward in one: B in place of I, no W, no syncs that wait for one.

    Communication stays as it is, so that ranks with and without W can run one schedule together.
    """
    programs, orders = (tuple(map(_whole, lines)) for lines in (plan.programs, plan.orders))
    return replace(plan, spec=replace(plan.spec, split_backward=False), programs=programs, orders=orders)


def _whole(program: Sequence[Instruction]) -> tuple[Instruction, ...]:
    last = {at.chunk: k for k, entry in enumerate(program) for at in entry.members or (entry,) if at.op in BACKWARD_OPS}
    return tuple(
        at._replace(op=BACKWARD) if at.op == INPUT_GRAD else at
        for k, at in enumerate(program)
        if at.op != WEIGHT_GRAD and not (at.op == ENABLE_GRAD_SYNC and k > last.get(at.chunk, k))
    )


def family_of(spec: PlanSpec) -> Family:
    """The schedule family that ``spec`` names. Raises PlanError."""
    family = find_family(spec.schedule)
    if family.chunks is not None and spec.num_chunks != family.chunks:
        raise PlanError(f"schedule {family.name} has {family.chunks} model chunk(s) a rank, not {spec.num_chunks}")
    return family
