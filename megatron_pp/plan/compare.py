"""Which schedule, how many chunks and microbatches: simulate the candidates, and rank those that fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import verified_plan
from megatron_pp.plan.costs import Network, StageCosts
from megatron_pp.plan.sim.memory import ModelShape, peak_bytes
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.sim.simulation import Simulation
from megatron_pp.plan.spec import PlanSpec


@dataclass(frozen=True)
class CostProfile:
    """Compute times of the whole model along its depth, from which any even split into stages gets its costs.

    Each list has one entry per equal part of the model, in model order; ``even`` makes one part.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    weight: tuple[float, ...]
    backward: tuple[float, ...]

    @classmethod
    def even(cls, forward: float, backward_input: float, weight: float, backward: float | None = None) -> CostProfile:
        """A model whose depth costs the same everywhere; times are of the whole model."""
        whole = backward_input + weight if backward is None else backward
        return cls((forward,), (backward_input,), (weight,), (whole,))

    @classmethod
    def of(cls, costs: StageCosts) -> CostProfile:
        """The profile that stages measured."""
        return cls(costs.forward, costs.backward_input, costs.weight, costs.backward)

    def stages(self, num_stages: int) -> StageCosts:
        """The costs of ``num_stages`` equal stages. Raises PlanError where the lists cannot be regrouped."""
        return StageCosts(
            forward=_regroup(self.forward, num_stages),
            backward=_regroup(self.backward, num_stages),
            backward_input=_regroup(self.backward_input, num_stages),
            weight=_regroup(self.weight, num_stages),
        )


def _regroup(parts: Sequence[float], count: int) -> tuple[float, ...]:
    """``parts`` of equal depth, added up or divided evenly into ``count`` of them."""
    if len(parts) % count == 0:
        each = len(parts) // count
        return tuple(sum(parts[i * each : (i + 1) * each]) for i in range(count))
    if count % len(parts) == 0:
        each = count // len(parts)
        return tuple(part / each for part in parts for _ in range(each))
    raise PlanError(
        f"times of {len(parts)} stages cannot be regrouped into {count}; give a multiple or a divisor of it"
    )


@dataclass(frozen=True)
class Candidate:
    """One schedule with its numbers. ``refused`` is the reason where it is refused; its numbers are 0 then.

    per_microbatch  makespan divided by M, which is what a fixed global batch costs
    peak_bytes      of the fullest rank (None without a model shape)
    peak_in_flight  (chunk, microbatch) pairs of the fullest rank
    messages, sent_bytes  of all ranks together
    """

    spec: PlanSpec
    makespan: float = 0.0
    bubble_share: float = 0.0
    peak_in_flight: int = 0
    peak_bytes: float | None = None
    messages: int = 0
    sent_bytes: float = 0.0
    refused: str = ""

    @property
    def per_microbatch(self) -> float:
        return self.makespan / self.spec.num_microbatches


def compare(
    specs: Iterable[PlanSpec],
    profile: CostProfile,
    network: Network,
    shape: ModelShape | None = None,
    memory_limit: float | None = None,
) -> list[Candidate]:
    """Every spec simulated: those that can be had, fastest per microbatch first, then the others with the reason.

    ``memory_limit`` is in bytes per rank, and needs ``shape``.
    """
    if memory_limit is not None and shape is None:
        raise PlanError("a memory limit needs the shape of the model")
    found = [_candidate(spec, profile, network, shape, memory_limit) for spec in specs]
    return sorted(found, key=lambda c: (bool(c.refused), c.per_microbatch, c.peak_bytes or 0.0))


def _candidate(
    spec: PlanSpec, profile: CostProfile, network: Network, shape: ModelShape | None, memory_limit: float | None
) -> Candidate:
    try:
        plan, _ = verified_plan(spec)
        result = simulate(plan, profile.stages(plan.placement.num_stages), network, spec.device)
        peak = max(peak_bytes(plan, shape)) if shape else None
    except PlanError as error:
        return Candidate(spec, refused=str(error))
    too_much = memory_limit is not None and peak is not None and peak > memory_limit
    refused = f"needs {peak / 2**30:.1f} GiB" if too_much and peak is not None else ""
    return _numbers(spec, result, peak, refused)


def _numbers(spec: PlanSpec, result: Simulation, peak: float | None, refused: str) -> Candidate:
    volume = result.volume().values()
    return Candidate(
        spec,
        makespan=result.makespan,
        bubble_share=result.bubble_share,
        peak_in_flight=max(result.peak_in_flight()),
        peak_bytes=peak,
        messages=sum(messages for messages, _ in volume),
        sent_bytes=sum(size for _, size in volume),
        refused=refused,
    )
