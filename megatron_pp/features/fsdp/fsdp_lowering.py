"""Places the instructions that gather the parameters of a rank's stages, free them, and reduce their gradients.

A *stay* is a stretch of a rank's compute in which a stage is whole. Presets say where stays begin and end:

``per_step``  from a stage's first operation to its last one
``per_run``   as long as operations of the stage follow each other
``zero2``     as ``per_step``, and the gradients of each microbatch are reduced behind its backward (ZeRO-2)
``zero3``     for one operation, with gradients as ``zero2`` (ZeRO-3)
``by_cost``   as few stays as the limit on whole stages allows, chosen by simulation (``by_cost.py``)

Boundary i is before entry i of the rank's compute. Behind the sends and receives that are posted there it has, in this
order: waits for reductions that are over, reductions, reshards and unshards. A preset posts an unshard one entry ahead
of the use, or later if the limit requires it. The wait for it is right before the use.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError
from megatron_pp.feature_table import BY_COST, FSDP_COLLECTIVES, PER_RUN, PER_STEP, ZERO2, ZERO3
from megatron_pp.features.fsdp import fsdp_instructions as fsdp
from megatron_pp.features.fsdp.replicas import check_replicas
from megatron_pp.features.fsdp.shard_lifetime import ShardWalk
from megatron_pp.features.fsdp.shard_memory import sharded_timeline
from megatron_pp.on_demand import load
from megatron_pp.plan.hooks import FeatureBytes, PlanHooks
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import NONE, Instruction, operations
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.repeated import Line, Lines
from megatron_pp.plan.ir.spec import Plan, PlanSpec, check_whole
from megatron_pp.plan.ir.tasks import Cell
from megatron_pp.plan.orders import find_family

_POSTED = ins.POST_OPS | {ins.BATCH}
Uses = Sequence[frozenset[int]]  # for each entry of a rank's compute, the chunks that it runs


class Stay(NamedTuple):
    """A chunk is whole from its first entry to its last. Its unshard is posted at the boundary ``post``."""

    post: int
    first: int
    last: int
    chunk: int


class ShardLayout(NamedTuple):
    """The stays and reductions of one rank. ``reduces``: boundary -> the chunks whose gradients are reduced there.
    ``waits``: boundary -> the chunks whose reduction is over there. The wait for any other reduction is before the
    chunk's next one, or at the end."""

    stays: tuple[Stay, ...]
    reduces: Mapping[int, Sequence[int]]
    waits: Mapping[int, Sequence[int]]


class _Hooks(PlanHooks):
    def checked(self, spec: PlanSpec) -> Mapping[str, Any]:
        check_whole("fsdp_max_active_stages", spec.fsdp_max_active_stages, 0)
        if spec.fsdp_collectives or spec.fsdp_max_active_stages:
            check_spec(spec)
        return {}

    def of_config(self, config: Any, placement: Placement, training: bool) -> Mapping[str, Any]:
        most = config.fsdp_max_active_stages or 0
        return {"fsdp_collectives": config.fsdp_collectives or "", "fsdp_max_active_stages": most}

    def needs_times(self, config: Any) -> bool:
        return bool(config.fsdp_collectives == BY_COST)

    def plan(self, spec: PlanSpec, lower: Callable[[PlanSpec], Plan]) -> Plan | None:
        return sharded_plan(spec, lower) if spec.fsdp_collectives else None

    def follower(
        self, plan: Plan, rank: int, facts: Mapping[Cell, int], error: Callable[..., PlanError]
    ) -> ShardWalk | None:
        return ShardWalk(plan, rank, error) if plan.spec.fsdp_collectives else None

    def bytes_of(self, plan: Plan, rank: int, shape: Any) -> FeatureBytes:
        """The bytes of parameters and gradients. Gradients that are whole for a time are fp32."""
        if not plan.spec.fsdp_collectives:
            return FeatureBytes()
        total = plan.placement.num_stages
        split = shape.parameters(plan.placement.stages[rank], total) * (shape.element_bytes + 4 + 12)
        of_each = [shape.parameters([stage], total) for stage in range(total)]
        whole = [shape.element_bytes * count for count in of_each]
        further = sharded_timeline(plan, rank, whole, [4 * count for count in of_each])
        return FeatureBytes(split / shape.data_parallel, whole=further)

    def check_plan(self, plan: Plan, device: Sequence[str]) -> None:
        if plan.spec.fsdp_collectives:
            check_replicas([plan, plan], device)


HOOKS = _Hooks()


def check_spec(spec: PlanSpec) -> None:
    """Raises PlanError if the collectives cannot keep the limit."""
    kind = spec.fsdp_collectives
    most = spec.fsdp_max_active_stages
    if not kind:
        raise PlanError(f"fsdp_max_active_stages is {most} without fsdp_collectives; choose {BY_COST} or {PER_RUN}")
    if kind not in FSDP_COLLECTIVES:
        raise PlanError(unknown("fsdp_collectives", kind, FSDP_COLLECTIVES))
    if kind in (PER_STEP, ZERO2) and 0 < most < spec.num_chunks:
        raise PlanError(
            f"fsdp_collectives {kind} keeps all {spec.num_chunks} stages of a rank whole, but fsdp_max_active_stages "
            f"is {most}; choose {BY_COST}, {PER_RUN} or {ZERO3}"
        )
    if spec.joins and most == 1 < spec.num_chunks:
        raise PlanError("fsdp_max_active_stages is 1, and the two halves of a pair may be of two stages; at least 2")


def sharded_plan(spec: PlanSpec, lower: Callable[[PlanSpec], Plan]) -> Plan:
    """The plan of ``spec``: the plan that ``lower`` makes without collectives, with collectives added. Raises
    PlanError.
    """
    plan = lower(replace(spec, fsdp_collectives="", fsdp_max_active_stages=0))
    if plan.placement.barriers:
        raise PlanError(f"schedule {spec.schedule} splits the output layer, which fsdp_collectives do not shard")
    own = find_family(spec.schedule).programs
    programs = own(spec) if own is not None else None
    if programs is None and spec.fsdp_collectives == BY_COST:
        return replace(plan, spec=spec, programs=load("fsdp.by_cost").placed_by_cost(plan, spec))
    return replace(plan, spec=spec, programs=programs or Sharded(plan.programs, lambda rank: preset(plan, spec, rank)))


class Sharded(Lines):
    """``programs`` with collectives, by the ``layout`` of each rank."""

    def __init__(self, programs: Sequence[Line], layout: Callable[[int], ShardLayout]) -> None:
        super().__init__(len(programs))
        self.programs = programs
        self.layout = layout

    def forget(self) -> None:
        super().forget()
        if isinstance(self.programs, Lines):
            self.programs.forget()

    def _make(self, rank: int) -> Line:
        return with_collectives(self.programs[rank], self.layout(rank))


def uses_of(program: Line) -> Uses:
    return [frozenset(one.chunk for one in operations(at)) for at in program if at.op in ins.COMPUTE_OPS]


def preset(plan: Plan, spec: PlanSpec, rank: int) -> ShardLayout:
    program = plan.programs[rank]
    kind = spec.fsdp_collectives
    uses = uses_of(program)
    stays = posted_ahead(_stretches(uses, kind), spec.fsdp_max_active_stages or spec.num_chunks)
    return ShardLayout(stays, reductions(program, kind in fsdp.REDUCES_EACH), {})


def _stretches(uses: Uses, kind: str) -> list[Stay]:
    """The stays of a preset, unsharded at their first entry."""
    open_: dict[int, Stay] = {}
    done: list[Stay] = []
    for i, chunks in enumerate(uses):
        for chunk in sorted(chunks):
            stay = open_.get(chunk)
            goes_on = kind in (PER_STEP, ZERO2) or (kind == PER_RUN and stay is not None and stay.last == i - 1)
            if stay is not None and not goes_on:
                done.append(stay)
            open_[chunk] = stay._replace(last=i) if stay is not None and goes_on else Stay(i, i, i, chunk)
    return sorted([*done, *open_.values()])


def posted_ahead(stays: Sequence[Stay], most: int) -> tuple[Stay, ...]:
    """``stays`` with their unshards one entry ahead of the use, if the chunk and ``most`` allow it."""
    found: list[Stay] = []
    for stay in stays:
        post = max(0, stay.first - 1)
        before = [one.last for one in found if one.chunk == stay.chunk]
        post = max([post, *(last + 1 for last in before)])
        while post < stay.first and sum(one.last >= post for one in found) >= most:
            post += 1
        found.append(stay._replace(post=post))
    return tuple(found)


def reductions(program: Line, each: bool) -> dict[int, list[int]]:
    """Boundary -> the chunks whose gradients are complete there; with ``each``, the gradients of one microbatch."""
    found: dict[int, list[int]] = defaultdict(list)
    last: dict[int, int] = {}
    entries = (at for at in program if at.op in ins.COMPUTE_OPS)
    for i, at in enumerate(entries):
        for one in operations(at):
            if one.op in ins.GRADIENT_OPS:
                last[one.chunk] = i
                if each:
                    found[i + 1].append(one.chunk)
    for chunk, i in () if each else last.items():
        found[i + 1].append(chunk)
    return found


def with_collectives(program: Line, layout: ShardLayout) -> Line:
    """``program`` with the instructions of ``layout``."""
    stages = {one.chunk: one.stage for at in program for one in operations(at) if one.op in ins.SINGLE_COMPUTE_OPS}
    at_boundary, before = _instructions(layout)
    made: list[Instruction] = []

    def add(found: Sequence[tuple[str, int]]) -> None:
        made.extend(ins.placed(op, stages[chunk], NONE, NONE, chunk) for op, chunk in found)

    boundary = 0
    due = True
    for at in program:
        if due and at.op not in _POSTED:
            add(at_boundary[boundary])
            due = False
        if at.op in ins.COMPUTE_OPS:
            add(before[boundary])
            boundary += 1
            due = True
        made.append(at)
    if due:
        add(at_boundary[boundary])
    add(before[boundary])
    return tuple(made)


_Found = dict[int, list[tuple[str, int]]]  # boundary -> (op, chunk) of each instruction


def _instructions(layout: ShardLayout) -> tuple[_Found, _Found]:
    """The instructions at each boundary, and those right before the entry behind it, or at the end."""
    at_boundary: _Found = defaultdict(list)
    before: _Found = defaultdict(list)
    running: set[int] = set()  # chunks whose gradients are being reduced
    stays = sorted(layout.stays)
    end = max(stay.last for stay in stays) + 1
    for boundary in sorted({*layout.reduces, *layout.waits}):
        for chunk in (*layout.waits.get(boundary, ()), *layout.reduces.get(boundary, ())):
            if chunk in running:
                at_boundary[boundary].append((fsdp.WAIT_REDUCE_GRAD, chunk))
                running.remove(chunk)
        at_boundary[boundary] += [(fsdp.REDUCE_GRAD, chunk) for chunk in layout.reduces.get(boundary, ())]
        running.update(layout.reduces.get(boundary, ()))
    for stay in stays:
        at_boundary[stay.last + 1].append((fsdp.RESHARD, stay.chunk))
        before[stay.first].append((fsdp.WAIT_UNSHARD, stay.chunk))
    for stay in stays:
        at_boundary[stay.post].append((fsdp.UNSHARD, stay.chunk))
    before[end] += [(fsdp.WAIT_REDUCE_GRAD, chunk) for chunk in sorted(running)]
    return at_boundary, before
