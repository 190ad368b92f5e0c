"""Training steps of packed sequences, each planned while the one before runs (``config.microbatch_costs``)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.packing.ahead import Planner
from megatron_pp.features.packing.packing import PackedStep, PackingRules, packed
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.planner.replan import Proposal, of_run
from megatron_pp.planner.step_ahead import NextStep


class PackedSteps:
    """``lengths``: of all sequences of each step, in tokens, in an order that all ranks know, as of a sampler or
    gathered over data-parallel ranks. Every rank of the job makes one of the same, gives it to its config as
    ``microbatch_costs`` beside ``pipeline_replan``, and calls ``next`` before each training step:

        steps = PackedSteps(lengths, PackingRules(ranks, rank_tokens, pair))
        config.microbatch_costs, config.pipeline_replan = steps, "every:100"
        step = steps.next()
        packs = step.of_rank(rank)  # of this rank's data iterator, one a microbatch

    The microbatches of all pipelines run in the order of ``step.slots``; losses and gradients are sums over tokens
    (``calculate_per_token_loss``), so neither order nor grouping changes them but for rounding, and one process that
    takes the same packs in this order has the same to the last bit.
    """

    def __init__(self, lengths: Iterable[Sequence[int]], rules: PackingRules) -> None:
        self.rules = rules
        self.current: PackedStep | None = None
        self.waited = 0.0  # seconds that ``next`` has waited for searches in all
        self._lengths = iter(lengths)
        self._following = self._pack()
        self._planner = Planner()
        self._asked = False
        self._proposal: Proposal | None = None
        self._plan: Plan | None = None

    def next(self) -> PackedStep:
        """The next step, in the order that was found for it while the one before ran; the first one as it was packed.
        Raises StopIteration after the last one, PipelineError where the search failed."""
        if self._following is None:
            raise StopIteration("all steps of packed sequences have been taken")
        step, self._following = self._following, self._pack()
        self._proposal = self._plan = None
        if self._asked:
            self._asked = False
            began = time.monotonic()
            found = self._planner.answer()
            self.waited += time.monotonic() - began
            step, self._proposal = step.ordered(found.order), found.proposal
        self.current = step
        return step

    def __call__(self) -> tuple[float, ...]:
        """``config.microbatch_costs``: of the step that was taken last. Raises ScheduleInputError before the first."""
        return self._taken().costs

    def plan_ahead(self, spec: PlanSpec, **more: Any) -> None:
        """The training step that begins asks for ``spec``; the one after it is planned now. ``more``: fields of
        NextStep. Raises ScheduleInputError for a step that was not taken by ``next``."""
        if self._asked:
            raise ScheduleInputError(
                "a training step begins whose microbatches were not taken: call next() of the PackedSteps that is "
                "config.microbatch_costs before each"
            )
        if self._following is not None:
            costs = self._following.costs
            self._planner.ask(NextStep(replace(spec, num_microbatches=len(costs)), costs, **more))
            self._asked = True

    def plan(self, run: PlanSpec) -> Plan | None:
        """What was found for the step that was taken last, where it is for steps like ``run``; None where the
        settings' own plan runs."""
        if self._proposal is None or of_run(self._proposal.spec) != of_run(run):
            return None
        if self._plan is None:
            self._plan = self._proposal.plan()
        return self._plan

    def digest(self) -> str:
        """Of the packs of the step that was taken last and their order, which all ranks have to agree on."""
        packs = [(pack.sequences, pack.lengths, pack.ranks) for slot in self._taken().slots for pack in slot.packs]
        return hashlib.sha256(repr(packs).encode()).hexdigest()[:16]

    def _taken(self) -> PackedStep:
        if self.current is None:
            raise ScheduleInputError("no step of packed sequences was taken yet; call next() before each training step")
        return self.current

    def _pack(self) -> PackedStep | None:
        lengths = next(self._lengths, None)
        return None if lengths is None else packed(lengths, self.rules)
