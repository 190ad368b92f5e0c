"""Builds, verifies and caches plans, so that a training step only executes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_pp.common.bounded_cache import BoundedCache
from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.certificate import REPETITION, Certificate
from megatron_pp.plan.ir.feature import hooks_of
from megatron_pp.plan.ir.instruction import (
    BACKWARD,
    BACKWARD_OPS,
    ENABLE_GRAD_SYNC,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Instruction,
    unjoined,
)
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.repeated import Line, Lines, Repeated, Repeating
from megatron_pp.plan.ir.spec import DEVICE_SYNC, Plan, PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.lower.order_check import run_of
from megatron_pp.plan.lower.repetition import block_at, fewest_microbatches, steady_place
from megatron_pp.plan.orders import find_family
from megatron_pp.plan.orders.family import Announce, Family
from megatron_pp.plan.verify.verifier import Verdict, verify

_PLANS: BoundedCache[PlanSpec, tuple[Plan, Verdict]] = BoundedCache(256 << 20, least=2)  # training and evaluation
_BUILDING = threading.RLock()  # if ranks are threads of one process, a plan is built once
_TEMPLATES: BoundedCache[PlanSpec, tuple[_Template | None]] = BoundedCache(256 << 20, least=2)
_INSTRUCTION = 136  # bytes of an instruction and the pointer to it
_TASK = 400  # bytes of a task and its instruction
_PLACES: dict[PlanSpec, int | None] = {}  # plan that was tried as a template -> the place of its block
_TRIALS = 3  # number of sizes that are tried for a template


def build_plan(spec: PlanSpec, announce: Announce | None = None) -> Plan:
    """The plan of ``spec``, verified. The same spec gives the same object.

    Raises PlanError for an unknown schedule, a number of chunks the schedule cannot have, or a plan that ``verify``
    refuses. ``announce`` is called with a sentence if a search for the plan takes long.
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
            template = _template(spec)
            if template is not None:
                plan = _enlarged(template, spec)
                found = _PLANS.put(spec, (plan, template.verdict), _TASK * len(template.plan.programs[0]))
            else:
                plan = lowered_plan(spec, announce)
                verdict = verify(plan)
                plan = replace(plan, proof=verdict.certificate)
                found = _PLANS.put(spec, (plan, verdict), _size((*plan.programs, *plan.orders)))
            _orders.cache_clear()
        return found


class _Template(NamedTuple):
    """A verified plan, with what ``verify`` found. Plans with whole periods of microbatches more are made from it."""

    plan: Plan
    verdict: Verdict
    programs: Repeating


def _template(spec: PlanSpec) -> _Template | None:
    """The template of ``spec``, made with its first plan. None if the plan has to be made by itself: its family, or so
    few microbatches, have no steady state, or none that is proven to repeat.
    """
    family = family_of(spec)
    if family.repeats is None:
        return None
    period, least = family.repeats(spec.shape)
    key = replace(spec, num_microbatches=period + spec.num_microbatches % period)
    known = _TEMPLATES.get(key)
    if known is None:
        fewest = fewest_microbatches(family.orders(spec.shape), spec.num_chunks * spec.num_parts, period)
        known = _first_template(spec, period, max(least, fewest))
        if known is None:
            return None
        template = known[0]
        known = _TEMPLATES.put(key, known, 0 if template is None else 2 * _size(template.plan.orders))
    template = known[0]
    return template if template and template.plan.spec.num_microbatches <= spec.num_microbatches else None


def _first_template(spec: PlanSpec, period: int, fewest: int) -> tuple[_Template | None] | None:
    """The smallest template from ``fewest`` microbatches on, in a tuple; (None,) if ``_TRIALS`` sizes have failed. None
    if only plans of more microbatches than ``spec`` may have one.
    """
    fewest += (spec.num_microbatches - fewest) % period
    step = period if spec.num_microbatches % period else -(-fewest // (2 * period)) * period
    tried = 0
    for size in range(fewest, spec.num_microbatches + 1, step):
        trial = replace(spec, num_microbatches=size)
        place = _steady_place(trial, period)
        if place is None:
            continue
        template = _proven(trial, period, place)
        if template is not None:
            return (template,)
        _PLACES[trial] = None  # do not try it again
        tried += 1
        if tried == _TRIALS:
            return (None,)
    return None


def _steady_place(spec: PlanSpec, period: int) -> int | None:
    """``steady_place`` of the programs of ``spec``, kept after the first call."""
    if spec not in _PLACES:
        more = replace(spec, num_microbatches=spec.num_microbatches + period)
        runs = [run_of(order, spec) for order in _orders(spec)]
        longer = [run_of(order, spec) for order in _orders(more)]
        _PLACES[spec] = steady_place(spec, period, runs, longer)
    return _PLACES[spec]


@collector_paused()
def _proven(spec: PlanSpec, period: int, place: int) -> _Template | None:
    """The plan of ``spec`` as a template; None if it is not proven to repeat."""
    try:
        plan = lowered_plan(spec)
        programs = Repeating(plan.programs, block_at(place, spec, period, plan.programs), {})
        more = replace(spec, num_microbatches=spec.num_microbatches + period)
        # A shorter last group changes the order far before it.
        if spec.num_microbatches % period and Repeated(programs, 1) != lowered_plan(more).programs:
            return None
        verdict = verify(plan, block=programs.block)
        if isinstance(plan.programs, Lines):
            plan.programs.forget()  # saves memory; each rank makes its own program again
        return _Template(plan, verdict, programs)
    except PlanError:  # also if the plan itself is refused: the plan of more microbatches then raises its own error
        return None


def _enlarged(template: _Template, spec: PlanSpec) -> Plan:
    """The plan of ``spec``, which is the template's plan with its block repeated."""
    more = spec.num_microbatches - template.plan.spec.num_microbatches
    programs = Repeated(template.programs, more // template.programs.block.microbatches)
    placement = template.plan.placement
    rules = (*template.verdict.certificate.rules, REPETITION)
    proof = Certificate.of(rules, template.verdict.device, spec, programs)
    return Plan(spec, placement, programs, _Orders(spec, placement), family_of(spec).remark(spec.shape), proof)


class _Orders(Lines):
    """The compute orders of ``spec``, made on first use."""

    def __init__(self, spec: PlanSpec, placement: Placement) -> None:
        super().__init__(spec.pipeline_size)
        self.spec = spec
        self.placement = placement

    def _make(self, rank: int) -> Line:
        for one, order in enumerate(_orders(self.spec)):
            self._made[one] = self.placement.place(one, order)
        return self._made[rank]


@lru_cache(maxsize=2)  # the programs of one period more are tried next as a template
def _orders(spec: PlanSpec) -> tuple[Sequence[Instruction], ...]:
    orders = family_of(spec).orders(spec.shape)
    return tuple(orders if spec.split_backward else map(_whole, orders))


def forget_plans() -> None:
    """Empty the caches."""
    _orders.cache_clear()
    _PLANS.clear()
    _TEMPLATES.clear()
    _PLACES.clear()


def _size(lines: Iterable[Line]) -> int:
    return _INSTRUCTION * sum(map(len, lines))


@collector_paused()
def lowered_plan(spec: PlanSpec, announce: Announce | None = None) -> Plan:
    """The plan of ``spec`` before it is verified."""
    for hooks in hooks_of(spec.added):
        plan = hooks.plan(spec, lambda plain: lowered_plan(plain, announce))
        if plan is not None:
            return plan
    if not spec.split_backward:
        return with_whole_backwards(lowered_plan(replace(spec, split_backward=True), announce))
    family = family_of(spec)
    placement = Placement(family.placement, spec.pipeline_size, spec.num_chunks, family.barriers)
    remark = family.remark(spec.shape)
    orders: tuple[Sequence[Instruction], ...]
    is_found = family.search is not None or family.programs is not None
    if is_found and DEVICE_SYNC in spec.device:  # the found order, with no receive posted ahead
        later = replace(spec, device=tuple(rule for rule in spec.device if rule != DEVICE_SYNC))
        orders, programs = tuple(tuple(unjoined(order)) for order in build_plan(later, announce).orders), None
    elif family.search is not None:
        return replace(family.search(spec, announce), spec=spec, remark=remark)
    else:
        orders, programs = _orders(spec), family.programs(spec) if family.programs is not None else None
    if programs is not None:
        placed = tuple(placement.place(rank, order) for rank, order in enumerate(orders))
        return Plan(spec, placement, programs, placed, remark)
    try:
        joint = family.joint(spec.shape)
        return lowered(spec, placement, orders, remark, settings_of(spec), joint)
    except PlanError as error:
        if not family.digest:
            raise
        raise type(error)(f"{family.name}: {error}") from error


def with_whole_backwards(plan: Plan) -> Plan:
    """``plan`` for a model with whole backwards: B in place of I, no W, no syncs that wait for a W.

    Communication stays as it is, so that ranks with and without W can run one schedule together.
    """
    spec, orders = replace(plan.spec, split_backward=False), tuple(map(_whole, plan.orders))
    return replace(plan, spec=spec, programs=_WithWholeBackwards(plan.programs), orders=orders)


class _WithWholeBackwards(Lines):
    """``programs`` for a model with whole backwards."""

    def __init__(self, programs: Sequence[Line]) -> None:
        super().__init__(len(programs))
        self.programs = programs

    def forget(self) -> None:
        super().forget()
        if isinstance(self.programs, Lines):
            self.programs.forget()

    def _make(self, rank: int) -> Line:
        return _whole(self.programs[rank])


def _whole(program: Sequence[Instruction]) -> tuple[Instruction, ...]:
    last = {at.chunk: k for k, entry in enumerate(program) for at in entry.members or (entry,) if at.op in BACKWARD_OPS}
    return tuple(
        at._replace(op=BACKWARD) if at.op == INPUT_GRAD else at
        for k, at in enumerate(program)
        if at.op != WEIGHT_GRAD and not (at.op == ENABLE_GRAD_SYNC and k > last.get(at.chunk, k))
    )


def settings_of(spec: PlanSpec) -> dict[str, Any]:
    """The settings of features in the plan: those of the spec, or else those of its schedule."""
    return {**family_of(spec).added(spec.shape), **dict(spec.added)}


def family_of(spec: PlanSpec) -> Family:
    """The schedule family that ``spec`` names. Raises PlanError."""
    family = find_family(spec.schedule)
    if family.chunks is not None and spec.num_chunks != family.chunks:
        raise PlanError(f"schedule {family.name} has {family.chunks} model chunk(s) a rank, not {spec.num_chunks}")
    for hooks in hooks_of(spec.added) if spec.added else ():
        hooks.check_family(spec, family)
    return family


def stage_numbers(schedule: str, pipeline_size: int, num_chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """The stages that each rank holds: ``stage_numbers(...)[rank][chunk]``, numbered from 0 in model order.

    ``schedule`` is a name or a path of a file. Most put chunk c of rank r at stage c * P + r; V schedules come
    back over the ranks (arXiv 2405.15362), so that rank 0 holds the first and the last stage. Raises PlanError for an
    unknown schedule, or one that has another number of chunks or of ranks.
    """
    family = family_of(PlanSpec(schedule, pipeline_size, num_chunks, num_microbatches=1))
    if family.shape is not None and family.shape.pipeline_size != pipeline_size:
        raise PlanError(f"{family.name} is a schedule for {family.shape.pipeline_size} ranks, not {pipeline_size}")
    return Placement(family.placement, pipeline_size, num_chunks).stages
