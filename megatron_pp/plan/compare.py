"""Which schedule, how many chunks and microbatches: simulate the candidates, and rank those that fit into memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import verified_plan
from megatron_pp.plan.costs import Network, StageCosts
from megatron_pp.plan.sim.memory import ModelShape, peak_bytes
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.sim.steady import steady_step
from megatron_pp.plan.spec import PlanSpec


@dataclass(frozen=True)
class Candidate:
    """One schedule with its numbers. ``refused`` is the reason where it is refused; its numbers are 0 then.

    per_microbatch  makespan divided by M, which is what a fixed global batch costs
    peak_bytes      of the fullest rank (None without a model shape)
    peak_in_flight  (chunk, microbatch) pairs of the fullest rank; a slice is its share of one
    messages, sent_bytes  of all ranks together
    """

    spec: PlanSpec
    makespan: float = 0.0
    bubble_share: float = 0.0
    peak_in_flight: float = 0
    peak_bytes: float | None = None
    messages: int = 0
    sent_bytes: float = 0.0
    refused: str = ""

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
) -> list[Candidate]:
    """Every spec simulated: those that can be had, fastest per microbatch first, then the others with the reason.

    ``costs`` are of the whole model in any number of equal parts. ``memory_limit`` is in bytes per rank, and needs
    ``shape``. With ``optimizer_bypass`` makespan and bubble are those of a step among others (``sim/steady.py``).
    """
    if memory_limit is not None and shape is None:
        raise PlanError("a memory limit needs the shape of the model")
    found = [_candidate(spec, costs, network, shape, memory_limit, optimizer_bypass) for spec in specs]
    return sorted(found, key=lambda c: (bool(c.refused), c.per_microbatch, c.peak_bytes or 0.0))


def _candidate(
    spec: PlanSpec,
    costs: StageCosts,
    network: Network,
    shape: ModelShape | None,
    memory_limit: float | None,
    optimizer_bypass: bool,
) -> Candidate:
    try:
        plan, _ = verified_plan(spec)
        conditions = (costs.regrouped(plan.placement.num_stages), network, spec.device)
        result = simulate(plan, *conditions)
        steady = steady_step(plan, *conditions) if optimizer_bypass else None
        peak = max(peak_bytes(plan, shape)) if shape else None
    except PlanError as error:
        return Candidate(spec, refused=str(error))
    volume = result.volume().values()
    return Candidate(
        spec,
        makespan=result.makespan if steady is None else steady.period,
        bubble_share=result.bubble_share if steady is None else steady.bubble_share,
        peak_in_flight=max(result.peak_in_flight()) / spec.slices,
        peak_bytes=peak,
        messages=sum(messages for messages, _ in volume),
        sent_bytes=sum(size for _, size in volume),
        refused="" if peak is None or memory_limit is None or peak <= memory_limit else f"needs {peak / 2**30:.1f} GiB",
    )
