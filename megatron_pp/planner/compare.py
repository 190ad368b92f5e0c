"""Compares schedules and numbers of chunks and microbatches: simulates plans and ranks those that fit into memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan, family_of, verified_plan
from megatron_pp.plan.costs.communicators import Outside
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import MemoryModel, Network, StageCosts
from megatron_pp.plan.ir.feature import hooks_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.memory import ModelShape, peak_bytes
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.simulate.steady import steady_step
from megatron_pp.planner.bound import Bound, bound_of
from megatron_pp.planner.plan_search import default_measured, peak_memory

_FITS = 4  # attempts to find a plan that fits into memory with all its messages


@dataclass(frozen=True)
class ComparedSchedule:
    """One schedule with its numbers. They are 0 if it is refused.

    per_microbatch        makespan / M: the cost of a fixed global batch
    peak_bytes            memory of the fullest rank; None without a model shape
    peak_in_flight        (chunk, microbatch) pairs of the fullest rank; a slice counts with its share
    messages, sent_bytes  of all ranks together
    refused               the reason if it is refused, otherwise empty
    bound                 bound of the makespan under the memory limit; None if steps in a row are compared
    """

    spec: PlanSpec
    makespan: float = 0.0
    bubble_share: float = 0.0
    peak_in_flight: float = 0
    peak_bytes: float | None = None
    messages: int = 0
    sent_bytes: float = 0.0
    refused: str = ""
    bound: Bound | None = None

    @property
    def per_microbatch(self) -> float:
        return self.makespan / self.spec.num_microbatches


def compare(
    specs: Iterable[PlanSpec],
    costs: StageCosts,
    network: Network,
    shape: ModelShape | None = None,
    memory_limit: float | None = None,
    optimizer_bypass: bool = False,
    outside: Outside | None = None,
) -> list[ComparedSchedule]:
    """Simulates all specs. The result has the possible ones, the fastest per microbatch first, then the refused ones.

    ``costs`` are of the whole model in any number of equal parts. ``memory_limit`` is in bytes per rank and needs
    ``shape``; ``outside`` is memory of it that is not for tensors. Schedules with a search plan for these costs and
    this limit. With ``optimizer_bypass``, makespan and bubble are those of one of many steps in a row (``steady.py``).
    """
    if memory_limit is not None and shape is None:
        raise PlanError("a memory limit needs the shape of the model")
    found = [_compared(spec, costs, network, shape, memory_limit, optimizer_bypass, outside) for spec in specs]
    return sorted(found, key=lambda one: (bool(one.refused), one.per_microbatch, one.peak_bytes or 0.0))


def _compared(
    spec: PlanSpec,
    costs: StageCosts,
    network: Network,
    shape: ModelShape | None,
    memory_limit: float | None,
    optimizer_bypass: bool,
    outside: Outside | None,
) -> ComparedSchedule:
    try:
        plan = _plan(spec, costs, network, shape, memory_limit, outside)
        conditions = (costs.regrouped(plan.placement.num_stages), network, spec.device)
        result = simulate(plan, *conditions)
        steady = steady_step(plan, *conditions) if optimizer_bypass else None
        peaks = peak_bytes(plan, shape) if shape else ()
        memory = searched_memory(plan)
        over = 0.0
        if shape is not None and memory_limit is not None:
            limits = _limits(plan.placement, spec, memory_limit, outside)
            over = max(peak - most for peak, most in zip(peaks, limits, strict=True))
            memory = _memory(plan.placement, shape, limits) if memory_limit and over <= 0 else None
        bound = None if optimizer_bypass else bound_of(plan, *conditions[:2], memory)
    except PlanError as error:
        return ComparedSchedule(spec, refused=str(error))
    volume = result.volume().values()
    return ComparedSchedule(
        spec,
        makespan=result.makespan if steady is None else steady.period,
        bubble_share=result.bubble_share if steady is None else steady.bubble_share,
        peak_in_flight=max(result.peak_in_flight()) / spec.num_parts,
        peak_bytes=max(peaks, default=None),
        messages=sum(messages for messages, _ in volume),
        sent_bytes=sum(size for _, size in volume),
        refused=f"needs {((memory_limit or 0.0) + over) / 2**30:.1f} GiB" if over > 0 else "",
        bound=bound,
    )


def fitted(spec: PlanSpec, costs: StageCosts, network: Network, memory: MemoryModel | None = None) -> PlanSpec:
    """``spec`` with the measured values that its search, or its collectives placed by cost, needs.

    They are these costs, the mean message time, and ``memory`` (None: that of 1F1B). A spec that needs none, or has
    measured values, is returned unchanged.
    """
    family = family_of(spec)
    by_cost = any(hooks.needs_times(spec) for hooks in hooks_of(spec.added))
    if (family.search is None and not by_cost) or spec.measured is not None:
        return spec
    placement = Placement(family.placement, spec.pipeline_size, spec.num_chunks)
    costs = costs.regrouped(placement.num_stages)
    times = []
    for source, target in placement.rank_edges:
        times += [network.message_time(FORWARD, source, target), network.message_time(BACKWARD, target, source)]
    transfer = sum(times) / len(times) if times else 0.0
    if (
        memory is None
        and not transfer
        and not by_cost
        and len({*costs.forward, *costs.backward_input, *costs.weight}) == 1
    ):
        return spec  # the search assumes these values anyway; nothing is offloaded without a limit
    limits = default_measured(placement)
    if memory is not None:
        limits = Measured(memory_limit=memory.limits, activation=memory.forward, weight_activation=memory.weight)
    others = {name: times for name in ("offload", "unshard", "reduce_grad") if any(times := getattr(costs, name))}
    return replace(spec, measured=limits.taking(costs, transfer=transfer, **others))


def searched_memory(plan: Plan) -> MemoryModel | None:
    """The memory limits for which a plan was searched; None if it was not searched."""
    measured = plan.spec.measured
    family = SCHEDULES.get(plan.spec.schedule)
    return None if measured is None or family is None or family.search is None else measured.memory(plan.placement)


def _limits(placement: Placement, spec: PlanSpec, limit: float, outside: Outside | None) -> tuple[float, ...]:
    """The bytes that torch may allocate on each rank."""
    if outside is None:
        return (limit,) * spec.pipeline_size
    return tuple(limit - nbytes for nbytes in outside.nbytes(placement, spec.policy, spec.channels))


def _plan(
    spec: PlanSpec,
    costs: StageCosts,
    network: Network,
    shape: ModelShape | None,
    limit: float | None,
    outside: Outside | None,
) -> Plan:
    """The verified plan. A search counts activations, but not the plan's messages. If activations and messages together
    exceed the limit, the search is repeated with a lower limit.
    """
    family = family_of(spec)
    if family.search is None or shape is None or limit is None:
        return verified_plan(fitted(spec, costs, network))[0]
    placement = Placement(family.placement, spec.pipeline_size, spec.num_chunks)
    limits = _limits(placement, spec, limit, outside)
    memory = _memory(placement, shape, limits)
    for _ in range(_FITS):
        plan = verified_plan(fitted(spec, costs, network, memory))[0]
        over = [max(0.0, peak - most) for peak, most in zip(peak_bytes(plan, shape), limits, strict=True)]
        if not any(over):
            break
        left = list(memory.limits)
        for rank, excess in enumerate(over):
            if excess:
                kept = peak_memory(plan.programs[rank], plan.placement.stages[rank], memory)
                left[rank] = max(0.0, kept - excess)
        memory = replace(memory, limits=tuple(left))
    return plan


def _memory(placement: Placement, shape: ModelShape, limits: Sequence[float]) -> MemoryModel:
    """The memory that microbatches keep, and the part of each rank's limit that parameters leave, in bytes."""
    count = placement.num_stages
    forward = tuple(shape.kept_bytes(stage, count) for stage in range(count))
    weight = tuple(shape.kept_for_weights(stage, count) for stage in range(count))
    static = (shape.static_bytes(stages, count) for stages in placement.stages)
    left = tuple(max(0.0, limit - nbytes) for limit, nbytes in zip(limits, static, strict=True))
    return MemoryModel(left, forward, weight)


@lru_cache(maxsize=128)
def predicted(spec: PlanSpec) -> str:
    """One line with the step, the bubble, and the distance of the step from its lower bound."""
    plan = build_plan(spec)
    measured = spec.measured or Measured()
    conditions = measured.costs(plan.placement.num_stages), measured.network()
    step = simulate(plan, *conditions)
    text = f"{spec.describe()}: predicted step {step.makespan:.4g}, bubble {step.bubble_share:.1%}"
    if not measured.microbatches:  # a bound needs microbatches of equal cost
        text += f", {bound_of(plan, *conditions, searched_memory(plan)).beside(step.makespan)}"
    return text
