"""Chooses the plans of steps whose microbatches cost differently (``config.microbatch_costs``).

Each rank has a process that searches while the training goes on. All ranks ask the same questions in the same steps,
and equal questions have equal answers, so all ranks run the same plan. The ranks compare its digest before it first
runs.
"""

from __future__ import annotations

import logging
import math
import statistics
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.measured_values import measured_of
from megatron_pp.config.settings import LAYER_GRAPHS, StepSettings, checked
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import PRIVATE_FIELDS, watched
from megatron_pp.features.packing.ahead import Planner
from megatron_pp.features.packing.proposal import of_run, why_not
from megatron_pp.features.packing.step_ahead import NextStep
from megatron_pp.features.packing.steps import PackedSteps
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.tracing.step_observer import StepObserver

logger = logging.getLogger("megatron_pp")

_KINDS = 64  # kinds of steps for which a model keeps plans; the oldest are dropped
_PER_OCTAVE = 2  # costs of microbatches are rounded to so many values between a cost and twice that cost

# Each belongs to a model, and is dropped with it.
_PLANNERS: ObjectTable[StepPlans] = ObjectTable()

Kind = tuple[PlanSpec, tuple[float, ...]]
"""The key of steps that run the same plan: the spec without its schedule, and the shares of the costs."""


def step_observer(step: Any) -> StepPlans | None:
    """The observer that chooses the plans of a step's model; None without ``microbatch_costs``. Raises
    ScheduleInputError if no plans can be searched for the step, or if numbers would change."""
    chunks = step.inputs.chunks
    settings = step.settings
    spec = step.draft
    if spec.forward_only or spec.pipeline_size == 1:
        return None
    wanted = PlansOfPackedSteps if isinstance(settings.microbatch_costs, PackedSteps) else PlansOfKinds
    found = _PLANNERS.get(chunks[0])
    if type(found) is not wanted:
        if len(chunks) > 1 and _share_parameters(chunks):
            raise _refusal("chunks of a rank share a parameter, whose gradient would be added up in another order")
        found = wanted(settings, chunks)
        found.check(settings, spec)
        _PLANNERS[chunks[0]] = found
    return found


def _refusal(why: str) -> ScheduleInputError:
    return ScheduleInputError(
        f"config.microbatch_costs is set, but steps of this run cannot have plans of their own: {why}; leave it out"
    )


def _share_parameters(chunks: Sequence[torch.nn.Module]) -> bool:
    seen = [id(parameter) for chunk in chunks for parameter in chunk.parameters()]
    return len(seen) != len(set(seen))


def _draw_random_numbers(settings: StepSettings, chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether forwards may draw random numbers. Then the chunks of a rank must keep their order."""
    if settings.hidden_dropout or settings.attention_dropout:
        return True
    kinds = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(part, kinds) and part.p > 0 for chunk in chunks for part in chunk.modules())


class StepPlans(StepObserver):
    """The plans of one model on one rank."""

    def __init__(self, settings: StepSettings, chunks: Sequence[torch.nn.Module]) -> None:
        self.draws = len(chunks) > 1 and _draw_random_numbers(settings, chunks)
        self._spec: PlanSpec | None = None  # the last spec that was checked

    def check(self, settings: StepSettings, spec: PlanSpec) -> None:
        """Raises ScheduleInputError if no other plans of ``spec`` can be searched."""
        why = why_not(spec)
        if not why and settings.cuda_graph_impl in LAYER_GRAPHS:
            graphs = settings.cuda_graph_impl
            why = f"config.cuda_graph_impl is {graphs!r}, whose graphs share memory in the order of their capture"
        for name in ("fine_grained_activation_offloading", "moe_paged_stash"):
            if not why and getattr(settings, name):
                why = f"config.{name} is set, by which Megatron finds activations in the order of the first steps"
        if why:
            raise _refusal(why)
        self._spec = spec

    def next_plan(self, step: Any, plan: Plan) -> Plan:
        """The plan of the step. If a search has failed or a rank is gone, raises the error that ends the step."""
        if plan.spec is not self._spec:
            self.check(step.settings, plan.spec)
        return self.chosen(step, plan)

    def chosen(self, step: Any, plan: Plan) -> Plan:
        raise NotImplementedError

    def description(self, plan: Plan, splits: bool) -> dict[str, str]:
        """The fields that ranks compare, because each of them has searched the plan by itself."""
        options = {name: getattr(plan.spec, name) for name in sorted(PRIVATE_FIELDS)}
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        return {
            "chunks draw random numbers": str(self.draws),
            "what a plan depends on, with microbatch_costs": f"split weight gradients={splits}, {text}",
            "plan": "" if plan.certificate is None else plan.certificate.digest,
        }


class PlansOfPackedSteps(StepPlans):
    """Plans each step while the one before runs. The microbatches of the next step are known."""

    def chosen(self, step: Any, plan: Plan) -> Plan:
        packed = step.settings.microbatch_costs
        settings = step.settings
        packed.wait_under(partial(_watched_search, weakref.ref(step.communicator)), settings.p2p_timeout)
        splits = step.weights is not None
        packed.plan_ahead(plan.spec, measured=_measured(settings), splits=splits, draws=self.draws)
        return packed.plan(plan.spec) or plan


class PlansOfKinds(StepPlans):
    """Plans for kinds of steps. Steps whose microbatches cost nearly the same are of one kind. The first step of a kind
    runs the settings' plan, and a search begins. The next step of this kind runs the plan that the search has found.

    One search runs at a time. A step waits for the search if it needs the answer, or if it is of a new kind itself. So
    the same steps wait on all ranks, however long each rank's search takes."""

    def __init__(self, settings: StepSettings, chunks: Sequence[torch.nn.Module]) -> None:
        super().__init__(settings, chunks)
        self.planner = Planner("steps of unequal microbatches")
        self.plans: OrderedDict[Kind, Plan | None] = OrderedDict()  # None: the settings' own plan stays
        self.searched: Kind | None = None  # the kind that the planner searches, until its answer is taken
        self._questions = 0

    def chosen(self, step: Any, plan: Plan) -> Plan:
        shares = in_steps(step.microbatch_costs) if step.microbatch_costs else ()
        if not shares:
            return plan
        kind = of_run(plan.spec), shares
        if kind not in self.plans and self.searched is not None:
            self._take(step.communicator, step.settings)
        if kind not in self.plans:
            self._ask(kind, step, plan)
            return plan
        self.plans.move_to_end(kind)
        return self.plans[kind] or plan

    def _ask(self, kind: Kind, step: Any, plan: Plan) -> None:
        splits = step.weights is not None
        measured = _measured(step.settings)
        self._questions += 1
        question = NextStep(plan.spec, kind[1], measured, splits, self.draws, keeps_order=True)
        self.planner.ask(self._questions, question)
        self.searched = kind

    def _take(self, communicator: P2PCore, settings: StepSettings) -> None:
        """Take the answer of the running search."""
        assert self.searched is not None
        # All ranks do this, because a watched wait counts as a step.
        with watched(communicator, settings, "the wait for the search of a plan for unequal microbatches") as guard:
            check = (lambda: None) if guard is None else guard.check
            answer = self.planner.answer(self._questions, settings.p2p_timeout, check)
        proposal = answer.proposal
        shares = ", ".join(map("{:g}".format, self.searched[1]))
        self.plans[self.searched] = found = None if proposal is None else proposal.plan()
        self.searched = None
        if len(self.plans) > _KINDS:
            self.plans.popitem(last=False)
        if communicator.transport.global_rank(communicator.rank) != 0:
            return
        why = answer.kept if proposal is None else proposal.sentence
        logger.info("microbatch_costs: for microbatches that take %s: %s", shares, why)
        if found is not None:
            logger.info("%s: %s", found.spec.describe(), found.certificate)


def _measured(settings: StepSettings) -> Measured | None:
    """The measured values in the settings."""
    measured: Measured | None = checked(measured_of, settings)
    return measured


def _watched_search(communicator: weakref.ref[P2PCore]) -> AbstractContextManager[Any]:
    """A context for the wait for a search between two steps. If the communicator is gone there is nothing to watch."""
    kept = communicator()
    guard = None if kept is None else kept.transport.guard
    return nullcontext() if guard is None else guard.watch("the wait for the search of the next step's plan")


def in_steps(costs: Sequence[float]) -> tuple[float, ...]:
    """``costs`` of microbatches as shares of their median, rounded to powers of the square root of 2, so that steps
    with nearly the same costs run the same plan. () if all are equal."""
    middle = statistics.median(costs)
    steps = [round(_PER_OCTAVE * math.log2(cost / middle)) for cost in costs]
    return tuple(2.0 ** (step / _PER_OCTAVE) for step in steps) if any(steps) else ()
