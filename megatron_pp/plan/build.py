"""Build, verify and cache plans: a training step only executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_pp.plan.files import ExchangeError
from megatron_pp.plan.instruction import Instruction
from megatron_pp.plan.lower import lower
from megatron_pp.plan.orders import Family, Order, Shape
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.schedule_file import find_family
from megatron_pp.plan.spec import Plan, PlanError, PlanSpec
from megatron_pp.plan.verify import Verdict, verify
from megatron_pp.plan.whole import with_whole_backwards


@lru_cache(maxsize=64)
def build_plan(spec: PlanSpec) -> Plan:
    """The plan of ``spec``, verified. The same spec gives the same object.

    Raises PlanError for an unknown schedule, a number of chunks the schedule can not have, or a plan that ``verify``
    refuses.
    """
    return verified_plan(spec)[0]


@lru_cache(maxsize=64)
def verified_plan(spec: PlanSpec) -> tuple[Plan, Verdict]:
    """The plan and what ``verify`` found: the peaks of memory on every rank."""
    plan = lowered_plan(spec)
    return plan, verify(plan)


def lowered_plan(spec: PlanSpec) -> Plan:
    """The plan of ``spec`` before it is verified."""
    if not spec.split_backward:
        return with_whole_backwards(lowered_plan(replace(spec, split_backward=True)))
    family = family_of(spec)
    placement = Placement(family.placement, spec.pipeline_size, spec.num_chunks)
    shape = Shape(spec.pipeline_size, spec.num_chunks, spec.num_microbatches, spec.effective_group_size)
    orders = family.orders(shape) if family.search is None else family.search(spec)
    programs = family.programs(spec) if family.programs is not None else None
    if programs is None:
        programs = tuple(map(tuple, _lowered(family, spec, placement, orders)))
    return Plan(spec, placement, programs, tuple(map(tuple, orders)), family.remark(shape))


def _lowered(family: Family, spec: PlanSpec, placement: Placement, orders: Sequence[Order]) -> list[list[Instruction]]:
    try:
        return lower(spec, placement, orders)
    except PlanError as error:
        if not family.digest:
            raise
        raise ExchangeError(f"{family.name}: {error}") from error


def family_of(spec: PlanSpec) -> Family:
    """The schedule family that ``spec`` names. Raises PlanError."""
    family = find_family(spec.schedule)
    if family.chunks is not None and spec.num_chunks != family.chunks:
        raise PlanError(f"schedule {family.name} has {family.chunks} model chunk(s) a rank, not {spec.num_chunks}")
    return family
