"""Finds another plan for a step whose microbatches cost differently.

The plan keeps the placement, the microbatches, the memory, and the order in which every sum is added up. So losses and
gradients are equal to the last bit.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import family_of, settings_of, with_whole_backwards
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import Network, StageCosts
from megatron_pp.plan.io.serialize import ComputeOf, spec_from_values, spec_values
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.certificate import Certificate
from megatron_pp.plan.ir.feature import known_settings
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.instruction_text import parse_program
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.repeated import Line, Lines
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner.plan_search import default_measured, peak_memory

LEAST_GAIN = 0.01
"""The least share by which the predicted step must be shorter for a change of plans."""

_SEARCHING = {family.placement: name for name, family in SCHEDULES.items() if family.search is not None}


@dataclass(frozen=True)
class Proposal:
    """A verified plan, as text that other processes read.

    programs       the text of each rank's program
    rules, device, digest  those of its certificate
    sentence       the old plan, the new one, and the predicted gain
    """

    spec: PlanSpec
    placement: str
    programs: tuple[str, ...]
    rules: tuple[str, ...]
    device: tuple[str, ...]
    digest: str
    sentence: str

    @property
    def shares(self) -> tuple[float, ...]:
        """Each microbatch's share of the costs; empty if all are equal."""
        return (self.spec.measured and self.spec.measured.microbatches) or ()

    def plan(self) -> Plan:
        """The plan, with the certificate of its verifier. Raises PlanError if the digest is not that of the
        programs."""
        found = hashlib.sha256("".join(f"rank {r}: {line}\n" for r, line in enumerate(self.programs)).encode())
        if f"sha256:{found.hexdigest()}" != self.digest:
            raise PlanError(f"the programs are not those of {self.digest}, which were verified")
        placement = Placement(self.placement, self.spec.pipeline_size, self.spec.num_chunks)
        programs = _Read(self.programs, placement)
        proof = Certificate.of(self.rules, self.device, self.spec, programs)
        return Plan(self.spec, placement, programs, ComputeOf(programs), proof=proof)

    def to_dict(self) -> dict[str, Any]:
        """The proposal as a value for JSON."""
        return {**vars(self), "spec": spec_values(self.spec)}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Proposal:
        """The proposal from a value of JSON."""
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in content.items()}
        values["spec"] = spec_from_values(dict(content["spec"]))
        return cls(**values)


class _Read(Lines):
    """Programs that are read from their text on first use."""

    def __init__(self, texts: Sequence[str], placement: Placement) -> None:
        super().__init__(len(texts))
        self.texts = texts
        self.placement = placement

    def _make(self, rank: int) -> Line:
        return self.placement.place(rank, parse_program(self.texts[rank]))


def of_run(spec: PlanSpec) -> PlanSpec:
    """The spec without the fields in which plans for the same steps may differ."""
    return replace(spec, schedule="", measured=None, split_backward=True, **known_settings(offload_chunks=None))


def why_not(spec: PlanSpec) -> str:
    """Why steps of ``spec`` cannot have other plans, in words; empty if they can."""
    family = family_of(spec)
    name = f"schedule {spec.schedule}"
    searching = SCHEDULES.get(_SEARCHING.get(family.placement, ""))
    reasons = (
        (family.digest, f"{name} is a file, whose order is the program's own"),
        (family.barriers, f"{name} splits the output layer over all ranks, for which no search plans"),
        (spec.num_parts > 1, "sequences are cut into slices, for which no search plans"),
        (dict(spec.added).get("skip_tensors"), "tensors skip stages, which no search plans for"),
        (spec.joins, "pairs of a forward and a backward run as one, whose time is not the sum of the two"),
        (
            settings_of(spec).get("offload_chunks"),
            "activations are offloaded, and copies between device and host are not timed",
        ),
        (
            searching is None or searching.chunks not in (None, spec.num_chunks),
            f"no search plans for {spec.num_chunks} chunk(s) a rank on placement {family.placement}",
        ),
    )
    return next((why for holds, why in reasons if holds), "")


Finder = Callable[[Plan, PlanSpec, Measured, Callable[[Plan], bool]], Iterable[Plan]]
"""(running plan, spec, measured, allowed) -> plans of the spec for the measured values, each of them allowed."""


def proposed(
    plan: Plan,
    splits: bool,
    draws: bool,
    costs: StageCosts,
    network: Network,
    shares: tuple[float, ...],
    finder: Finder,
) -> Proposal | str:
    """A plan that is predicted to be faster than the running ``plan`` by at least LEAST_GAIN, or a sentence why there
    is none.

    splits  whether the model can run weight gradients later than input gradients
    draws   whether forwards draw random numbers; then all forwards of a rank keep their order
    shares  each microbatch's share of the costs
    finder  makes the plans among which the fastest one is chosen
    """
    costs = replace(costs, microbatches=shares)
    measured = _measured(plan, costs if splits else _whole(costs), network)
    if not splits:  # no weight gradient runs later
        measured = replace(measured, weight_activation=0.0)
    before = [_sums(order, draws) for order in plan.orders]

    def adds_up_alike(other: Plan) -> bool:
        orders = other.orders if splits else with_whole_backwards(other).orders
        return [_sums(order, draws) for order in orders] == before

    kind = plan.placement.kind
    whole = known_settings(offload_chunks=0)
    spec = replace(plan.spec, schedule=_SEARCHING[kind], measured=measured, split_backward=splits, **whole)
    device = () if network.gloo else spec.device

    def step_of(other: Plan) -> float:
        return simulate(other, costs, network, device).makespan

    plans = list(finder(plan, spec, measured, adds_up_alike))
    if not plans:
        return "no other order is found"
    found, certificate = _best(plans, step_of)
    old = step_of(plan)
    new = step_of(found)
    gain = 1.0 - new / old if old else 0.0
    if gain < LEAST_GAIN:
        return f"{spec.schedule} finds none that is shorter by {LEAST_GAIN:.0%} (the best one: {gain:.1%})"
    steps = f"from {plan.spec.describe()}, predicted step {old:.4g} ms, to {spec.schedule}, {new:.4g} ms"
    sentence = f"{steps}: shorter by {gain:.1%}"
    programs = tuple(map(ins.format_program, found.programs))
    return Proposal(spec, kind, programs, certificate.rules, certificate.device, certificate.digest, sentence)


def _best(plans: Sequence[Plan], step_of: Callable[[Plan], float]) -> tuple[Plan, Certificate]:
    """The shortest plan that ``verify`` accepts."""
    *others, last = sorted(plans, key=step_of)
    for plan in others:
        with suppress(PlanError):
            return plan, verify(plan).certificate
    return last, verify(last).certificate


def _measured(plan: Plan, costs: StageCosts, network: Network) -> Measured:
    """The measured values for the search: these costs, and the memory of the running plan."""
    measured = plan.spec.measured
    if measured is None and plan.spec.schedule in _SEARCHING.values():
        measured = default_measured(plan.placement)
    if measured is None:  # as papers count: a forward counts 1 until its weight gradient is done
        free = Measured(activation=1.0, weight_activation=1.0)
        memory = free.memory(plan.placement)
        rows = zip(plan.orders, plan.placement.stages, strict=True)
        measured = replace(free, memory_limit=tuple(peak_memory(order, stages, memory) for order, stages in rows))
    transfer = network.link.latency + network.link.wire_time(network.activation_bytes)
    links = tuple((*edge, network.message_time(ins.FORWARD, *edge)) for edge in sorted(network.links))
    mbs = costs.microbatches or None
    whole = known_costs(offload=None)
    return measured.taking(costs, transfer=transfer, links=links, microbatches=mbs, **whole)


def _whole(costs: StageCosts) -> StageCosts:
    """Costs for a model with whole backwards, split as the search expects it."""
    return replace(costs, backward_input=costs.backward, weight=(0.0,) * costs.num_stages)


def _sums(order: Sequence[Instruction], draws: bool) -> dict[Any, list[Any]]:
    """Sum of a rank -> the order of its terms. Sums are the losses of each chunk, its gradients, and those that W adds;
    with ``draws`` also the forwards of all chunks.
    """
    rows: defaultdict[Any, list[Any]] = defaultdict(list)
    for at in ins.unjoined(order):
        if at.op == ins.FORWARD:
            rows[ins.FORWARD, None if draws else at.chunk].append((at.chunk, at.mb))
        if at.op in ins.BACKWARD_OPS:
            rows[ins.BACKWARD, at.chunk].append(at.mb)
        if at.op in (ins.BACKWARD, ins.WEIGHT_GRAD):
            rows[ins.WEIGHT_GRAD, at.chunk].append(at.mb)
    return rows
