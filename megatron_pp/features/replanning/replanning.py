"""Runs that plan anew while they go on (``config.pipeline_replan``).

Steps are counted in windows of ``every:N`` training steps. The last steps of a window are recorded, as a trace records
them. While training goes on, a process searches for a plan that is faster under what was measured
(``replan_thread.py``, ``proposing.py``); when all ranks have it, all change to it at the same boundary of two
windows. No step waits for a search.
"""

from __future__ import annotations

import logging
import math
import statistics
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.transport import Transport
from megatron_pp.common.finalizers import finalize_here
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config import rules
from megatron_pp.config.checks import replan_steps
from megatron_pp.config.settings import LAYER_GRAPHS, StepSettings, checked
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import PRIVATE_FIELDS, watched
from megatron_pp.features.packing.steps import PackedSteps
from megatron_pp.features.replanning.replan_thread import Change, ReplanThread, Window
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.planner.replan import of_run, why_not
from megatron_pp.tracing.observers import Observer, StepObserver

logger = logging.getLogger("megatron_pp")

_RECORDED = 2  # steps at the end of a window
_ASKED = 4  # of the kinds of steps with unequal microbatches: for how many a window asks for plans
_PER_OCTAVE = 2  # steps in which what microbatches cost is rounded

# One belongs to a model, and goes with it.
_REPLANNINGS: ObjectTable[Replanning] = ObjectTable()


def step_observer(step: Any) -> Replanning | None:
    """What plans the training of a StepCall's model anew; None where nothing does. Raises ScheduleInputError where
    plans of it cannot be searched, or numbers would change."""
    chunks, settings, fields = step.inputs.chunks, step.settings, step.fields
    if fields["forward_only"] or fields["pipeline_size"] == 1:
        return None
    found = _REPLANNINGS.get(chunks[0])
    if found is None or found.every != replan_steps("pipeline_replan", settings.pipeline_replan):
        if len(chunks) > 1 and _share_parameters(chunks):
            why = "chunks of a rank share a parameter, whose gradient would be added up in another order"
            raise _refusal(settings, why)
        found = Replanning(settings, chunks)
        found.check(settings, PlanSpec(**fields))
        _REPLANNINGS[chunks[0]] = found
    return found


def _refusal(settings: StepSettings, why: str) -> ScheduleInputError:
    value = settings.pipeline_replan
    return ScheduleInputError(
        f"config.pipeline_replan is {value!r}, but this run cannot be planned anew: {why}; leave it out"
    )


def _share_parameters(chunks: Sequence[torch.nn.Module]) -> bool:
    seen = [id(parameter) for chunk in chunks for parameter in chunk.parameters()]
    return len(seen) != len(set(seen))


def _draw_random_numbers(settings: StepSettings, chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether forwards may: then several chunks of a rank have to take turns as before."""
    if settings.hidden_dropout or settings.attention_dropout:
        return True
    kinds = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(part, kinds) and part.p > 0 for chunk in chunks for part in chunk.modules())


class Replanning(StepObserver):
    """Changes the plans of one model on one rank, at boundaries that all ranks agree on."""

    def __init__(self, settings: StepSettings, chunks: Sequence[torch.nn.Module]) -> None:
        self.every = replan_steps("pipeline_replan", settings.pipeline_replan)
        self.ahead = max(1, self.every // 10)  # steps from a decision to its boundary
        self.step = 0
        self.draws = len(chunks) > 1 and _draw_random_numbers(settings, chunks)
        self.thread: ReplanThread | None = None  # None before the first step
        self.window: Window | None = None
        self.packed: PackedSteps | None = None  # whose steps are planned one by one
        self.holds = 0  # the answer that is in force
        self.plans: dict[tuple[PlanSpec | None, tuple[float, ...]], Change] = {}
        self.asked: Counter[tuple[float, ...]] = Counter()
        self._spec: PlanSpec | None = None
        self._run: PlanSpec | None = None  # what plans for its steps have in common

    def check(self, settings: StepSettings, spec: PlanSpec) -> None:
        """Raises ScheduleInputError where plans of ``spec`` cannot be searched anew."""
        why = why_not(spec)
        if not why and settings.cuda_graph_impl in LAYER_GRAPHS:
            graphs = settings.cuda_graph_impl
            why = f"config.cuda_graph_impl is {graphs!r}, whose graphs share memory in the order of their capture"
        for name in ("fine_grained_activation_offloading", "moe_paged_stash"):
            if not why and getattr(settings, name):
                why = f"config.{name} is set, by which Megatron finds activations in the order of the first steps"
        if why:
            raise _refusal(settings, why)
        self._spec, self._run = spec, of_run(spec)

    def next_plan(self, step: Any, plan: Plan) -> Plan:
        """Raises what ends a step where a rank is gone."""
        communicator, settings, splits = step.communicator, step.settings, step.weights is not None
        costs = settings.microbatch_costs
        self.packed = packed = costs if isinstance(costs, PackedSteps) else None
        shares = in_steps(step.microbatch_costs) if step.microbatch_costs and packed is None else ()
        if plan.spec is not self._spec:
            self.check(settings, plan.spec)
        if self.thread is None:
            self.thread = _thread_of(communicator.transport)
            finalize_here(self, self.thread.close)
        self.step += 1
        boundary, into = divmod(self.step - 1, self.every)
        if into == 0 and boundary:
            self._report(boundary, splits)
            self._change(boundary, communicator, settings)
        if into == self.every - self.ahead:
            self.thread.expect(boundary + 1)
        if self.every - into <= _RECORDED and self.step > 1 and self.window is None:
            self.window = Window(communicator.transport)
        self.thread.stirred = True
        if shares and (self._run, shares) not in self.plans:
            self.asked[shares] += 1
        if packed is not None:
            packed.wait_under(partial(_watched_search, weakref.ref(communicator)), settings.p2p_timeout)
            packed.plan_ahead(plan.spec, measured=self._measured(settings), splits=splits, draws=self.draws)
            return packed.plan(plan.spec) or plan
        if not self.plans:
            return plan
        found = self.plans.get((self._run, shares)) or self.plans.get((self._run, ()))
        return plan if found is None else found.plan

    def observers(self, step: Any, plan: Plan, size: float) -> Sequence[Observer]:
        """The last steps of a window are recorded."""
        return [] if self.window is None else [self.window.recording(plan, self.step, size)]

    def description(self, plan: Plan, splits: bool) -> dict[str, str]:
        """As all run the plan of one of them."""
        options = {name: getattr(plan.spec, name) for name in sorted(PRIVATE_FIELDS)}
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        packed = {}
        if self.packed is not None:
            packed = {"chunks draw random numbers": str(self.draws)}
        return packed | {
            "what a plan depends on, with pipeline_replan": f"split weight gradients={splits}, {text}",
            "plan": "" if plan.certificate is None else plan.certificate.digest,
        }

    def _measured(self, settings: StepSettings) -> Measured | None:
        """What the job has measured last, and agreed on; before, what its settings give."""
        found = [change.plan.spec.measured for change in self.plans.values() if not change.shares]
        return found[-1] if found else checked(rules.measured_of, settings)

    def _report(self, window: int, splits: bool) -> None:
        assert self.thread is not None
        if self.window is not None:
            self.window.resolve_pending()
            shares = [list(shares) for shares, _ in self.asked.most_common(_ASKED)]
            self.thread.report(window, self.window, {"splits": splits, "draws": self.draws, "shares": shares})
        self.window = None
        self.asked.clear()

    def _change(self, boundary: int, communicator: P2PCore, settings: StepSettings) -> None:
        thread = self.thread
        assert thread is not None
        # On all ranks, as what is watched counts as a step.
        with watched(communicator, settings, "the agreement on the plan of the next steps") as guard:
            number = thread.decision(boundary, guard.check)
        if number == self.holds:
            return
        self.holds = number
        changes = thread.taken(number)
        if any(not change.shares for change in changes):
            self.plans.clear()  # made for what stages and links took before
        for change in changes:
            self.plans[of_run(change.plan.spec), change.shares] = change
            if thread.rank == 0:
                logger.warning("pipeline_replan: from training step %d on, %s", self.step, change.sentence)
                logger.info("%s: %s", change.plan.spec.describe(), change.plan.certificate)


def _thread_of(transport: Transport) -> ReplanThread:
    if transport.store is None:
        raise ScheduleInputError("config.pipeline_replan needs a store that the ranks share, and their group has none")
    world = dist.get_world_size() if dist.is_initialized() else transport.size
    rank = transport.global_rank(transport.rank)
    return ReplanThread(transport.store, rank, world, transport.rank, _REPLANNINGS.items)


def _watched_search(communicator: weakref.ref[P2PCore]) -> AbstractContextManager[Any]:
    """Around the wait for a search, between two steps; a communicator that is gone has no ranks to watch."""
    kept = communicator()
    guard = None if kept is None else kept.transport.guard
    return nullcontext() if guard is None else guard.watch("the wait for the search of the next step's plan")


def in_steps(costs: Sequence[float]) -> tuple[float, ...]:
    """``costs`` of microbatches as shares of their median, rounded to powers of the square root of 2, so that steps
    with nearly the same run the same plan; () where all are the same."""
    middle = statistics.median(costs)
    steps = [round(_PER_OCTAVE * math.log2(cost / middle)) for cost in costs]
    return tuple(2.0 ** (step / _PER_OCTAVE) for step in steps) if any(steps) else ()
