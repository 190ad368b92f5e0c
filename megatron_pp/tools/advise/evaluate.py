"""Builds a candidate's plan, verifies it under the rules of its device, and simulates it."""

import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import verified_plan
from megatron_pp.plan.costs.activations import host_timeline
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import MemoryModel, StageCosts
from megatron_pp.plan.ir.feature import known_settings
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import Verdict, verify
from megatron_pp.planner.bound import Bound, bound_of, lower_bound
from megatron_pp.planner.timing import kept_states
from megatron_pp.tools.advise.candidates import Candidate, cut_model, fixed_memory, tensors_before
from megatron_pp.tools.advise.fit import Fitted, Room, fitted, with_recomputed
from megatron_pp.tools.advise.model import PART, Model
from megatron_pp.tools.advise.question import Question
from megatron_pp.tools.advise.rounding import ROUNDING, rounded


@dataclass(frozen=True)
class Outcome:
    """A candidate with its numbers. They are 0 if no plan was simulated.

    refused      the reason if the candidate is impossible, otherwise empty
    spec         the spec of the verified plan; with ``measured`` if a search has made the plan
    step         milliseconds, simulated
    flagged      milliseconds with Megatron's flags: all stages recompute as many layers as the stage that recomputes
                 most
    bubble       share of all ranks' time without compute
    exposed      shares of all ranks' time: waits for a peer's compute, for messages in flight, behind other messages
    on_host      the most GB that a rank has offloaded to host memory at one time
    again        share of all ranks' time for recomputation
    bound        the lower bound of all plans on this placement; None if no plan was simulated
    certificate  the proof of ``verify``
    """

    candidate: Candidate
    refused: str = ""
    spec: PlanSpec | None = None
    step: float = 0.0
    flagged: float = 0.0
    bubble: float = 0.0
    exposed: tuple[float, float, float] = (0.0, 0.0, 0.0)
    on_host: float = 0.0
    again: float = 0.0
    fit: Fitted | None = None
    bound: Bound | None = None
    certificate: dict[str, Any] | None = None

    @property
    def pinned(self) -> float:
        """The most GB of pinned host memory. Buffers have sizes of powers of two, so it is at most twice
        ``on_host``."""
        return 2 * self.on_host

    @property
    def peak(self) -> float:
        """GB of the fullest rank."""
        return max(self.fit.peaks) if self.fit is not None else 0.0

    @property
    def excess(self) -> float:
        """The share by which the step is longer than the bound."""
        return self.bound.excess(self.step) if self.bound is not None else 0.0


def evaluate(question: Question, candidate: Candidate, cut: Fitted | None = None) -> Outcome:
    """The candidate with its numbers. ``cut`` is the model on its stages, if known.

    A search plans without recomputation if that fits. It plans with the recomputation of its estimate if the lower
    bound under the memory limit is then lower.
    """
    model = candidate.model(question)
    try:
        cut = cut or cut_model(question, candidate, model)
        if not candidate.searches:
            return _run(question, candidate, model, cut)
    except PlanError as error:
        return Outcome(candidate, str(error))
    plain = with_recomputed(cut, (0,) * len(cut.stages))
    if not any(cut.recomputed):
        return _searched(question, candidate, model, plain)
    both = sorted((plain, cut), key=lambda one: rounded(least_step(question, candidate, model, one)))
    found = _searched(question, candidate, model, both[0])
    return _searched(question, candidate, model, both[1]) if found.refused else found


def least_step(question: Question, candidate: Candidate, model: Model, cut: Fitted) -> float:
    """A lower bound in milliseconds of all plans under the memory limit; infinity if nothing fits."""
    placement = candidate.placement(question.pipeline_size)
    try:
        memory = MemoryModel(limits_of(question, candidate, model, cut), cut.activation, cut.late)
        conditions = candidate.num_microbatches, cut.costs, question.network(model), memory
        return lower_bound(placement, *conditions, split=question.splits_backward, slices=candidate.slices).step
    except PlanError:
        return math.inf


def _searched(question: Question, candidate: Candidate, model: Model, cut: Fitted) -> Outcome:
    try:
        return _run(question, candidate, model, cut, measured_of(question, candidate, model, cut))
    except PlanError as error:
        return Outcome(candidate, str(error))


def limits_of(question: Question, candidate: Candidate, model: Model, cut: Fitted) -> tuple[float, ...]:
    """The GB of each rank for activations. Raises PlanError if parameters alone fill the memory."""
    fixed = fixed_memory(question, candidate, model, tensors_before(question, candidate))
    needed = list(map(math.fsum, zip(cut.static, fixed, strict=True)))
    limits = [question.memory * candidate.memory_share - gb for gb in needed]
    if min(limits) <= 0:
        alone = "parameters, pipeline tensors, communicators and CUDA context alone need"
        raise PlanError(f"{alone} {max(needed):.3g} GB, but a device has {question.memory:g}")
    return tuple(limits)


def measured_of(question: Question, candidate: Candidate, model: Model, cut: Fitted) -> Measured:
    """The measured values for which the search plans. Raises PlanError if parameters alone fill the memory."""
    return Measured(
        cut.costs.forward,
        cut.costs.backward_input,
        cut.costs.weight,
        transfer=question.transfer(model),
        memory_limit=limits_of(question, candidate, model, cut),
        activation=cut.activation,
        weight_activation=cut.late,
    )


def spec_of(question: Question, candidate: Candidate, measured: Measured | None = None) -> PlanSpec:
    return PlanSpec(
        candidate.schedule,
        question.pipeline_size,
        candidate.num_chunks,
        candidate.num_microbatches,
        candidate.group_size,
        candidate.policy,
        measured=measured,
        split_backward=question.splits_backward or not candidate.family.splits_weight,
        device=question.device,
        **known_settings(
            slices=candidate.slices,
            offload_chunks=candidate.offload_chunks,
            offload_slots=candidate.offload_slots,
        ),
    )


def _run(
    question: Question, candidate: Candidate, model: Model, cut: Fitted, measured: Measured | None = None
) -> Outcome:
    """Builds, verifies and simulates the plan. Raises PlanError for a plan that is refused."""
    spec = spec_of(question, candidate, measured)
    plan, verdict = verified_plan(spec)
    if question.keep_outputs:
        verdict = verify(plan, deallocate=False)
    logits = max(one.each.logits for one in verdict.ranks)
    fixed = fixed_memory(question, candidate, model, tensors_of(verdict), logits)
    lines = plan.programs if candidate.offload_chunks else plan.orders
    states = [kept_states(line, candidate.num_chunks) for line in lines]
    room = Room(plan.placement, states, candidate.slices, question.memory, fixed)
    may_change = question.recompute and not candidate.searches  # a searched plan was made for these costs
    cut = fitted(cut.stages, room, model, may_change) if may_change else _peaks(cut, room)
    network = question.network(model)
    if candidate.offload_chunks and question.host_bandwidth is not None:
        copies = tuple(activation / question.host_bandwidth for activation in cut.activation)
        cut = replace(cut, costs=replace(cut.costs, **known_costs(offload=copies)))
    result = simulate(plan, cut.costs, network, spec.device)
    even = _evenly_recomputed(cut)
    flagged = result.makespan if even == cut.costs else simulate(plan, even, network, spec.device).makespan
    whole = result.makespan * len(result.busy)
    late = sum(one.peer_late for one in result.waits)
    moving = sum(one.transfer for one in result.waits)
    exposed = late / whole, moving / whole, sum(one.queued for one in result.waits) / whole
    again = _recomputed_time(cut) * candidate.num_microbatches / whole
    limits = tuple(max(0.0, question.memory - a - b) for a, b in zip(cut.static, fixed, strict=True))
    memory = MemoryModel(limits, cut.activation, cut.late)
    over = max(cut.peaks) - question.memory
    refused = ""
    if over > question.memory * ROUNDING:
        rank = cut.peaks.index(max(cut.peaks))
        recomputed = ", all layers recomputed" if any(cut.recomputed) else ""
        refused = f"needs {cut.peaks[rank]:.3g} GB on rank {rank}{recomputed}"
    elif not question.takes(candidate.schedule):
        refused = f"the model must split its output layer over all ranks; if it can, --schedules {candidate.schedule}"
    bound = bound_of(plan, cut.costs, network, None if refused else memory).of_step(result.makespan)
    certificate = None if plan.certificate is None else plan.certificate.to_dict()
    hosts = zip(plan.programs, plan.placement.stages, strict=True)
    on_host = max(max(host_timeline(line, row, cut.activation), default=0.0) for line, row in hosts)
    numbers = result.makespan, flagged, result.bubble_share, exposed, on_host, again
    return Outcome(candidate, refused, spec, *numbers, cut, bound, certificate)


def _evenly_recomputed(cut: Fitted) -> StageCosts:
    """The costs if all stages recompute as many layers as the stage that recomputes most; unchanged if layers are not
    known."""
    if any(one.kind == PART for layers in cut.stages for one in layers):
        return cut.costs
    even = with_recomputed(cut, (max(cut.recomputed),) * len(cut.recomputed)).costs
    return replace(cut.costs, backward=even.backward, backward_input=even.backward_input)


def _peaks(cut: Fitted, room: Room) -> Fitted:
    """``cut`` with the peaks of the plan that ``room`` describes."""
    kept = [room.kept(rank, cut.activation, cut.late) for rank in range(len(cut.static))]
    return replace(cut, peaks=tuple(map(math.fsum, zip(cut.static, room.fixed, kept, strict=True))))


def tensors_of(verdict: Verdict) -> tuple[int, ...]:
    """The pipeline tensors of each rank, without the inputs of its stages: these are counted as activations."""
    return tuple(max(0, peaks.tensors - peaks.each.inputs) for peaks in verdict.ranks)


def _recomputed_time(cut: Fitted) -> float:
    """The milliseconds of recomputation per microbatch, of all stages together."""
    plain = sum(one.backward_input for layers in cut.stages for one in layers)
    return max(0.0, sum(cut.costs.backward_input) - plain)
