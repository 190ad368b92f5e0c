"""Training steps of packed sequences, each planned while the one before runs (``config.microbatch_costs``)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from megatron_pp.errors import PipelineError, ScheduleInputError
from megatron_pp.features.packing.ahead import Planner
from megatron_pp.features.packing.packing import PackedStep, PackingRules, packed
from megatron_pp.features.packing.proposal import Proposal, of_run
from megatron_pp.features.packing.step_ahead import NextStep, StepAhead
from megatron_pp.plan.ir.spec import Plan, PlanSpec


class PackedSteps:
    """Packs the sequences of each step and plans the step ahead. ``lengths`` yields the lengths in tokens of all
    sequences of each step, in an order that is the same on all ranks, for example from a sampler or gathered over
    data-parallel ranks. Every rank of the job makes one with equal arguments, gives it to its config as
    ``microbatch_costs``, and calls ``next`` before each training step:

        steps = PackedSteps(lengths, PackingRules(ranks, rank_tokens, pair))
        config.microbatch_costs = steps
        step = steps.next()
        packs = step.of_rank(rank)  # of this rank's data iterator, one a microbatch

    The microbatches of all pipelines run in the order of ``step.slots``. Losses and gradients are sums over tokens
    (``calculate_per_token_loss``), so order and grouping change them only by rounding. One process that takes the same
    packs in this order has the same numbers to the last bit.
    """

    def __init__(self, lengths: Iterable[Sequence[int]], rules: PackingRules) -> None:
        self.rules = rules
        self.current: PackedStep | None = None
        self.waited = 0.0  # seconds that ``next`` has waited for searches, in total
        self._lengths = iter(lengths)
        self._drawn: Sequence[int] | None = None  # lengths that were drawn and not packed yet
        self._broken = ""  # the error that ``lengths`` raised
        self._following = self._pack()
        self._planner = Planner("the next step of packed sequences")
        self._asked = 0  # the number of the step that is being planned; 0: none
        self._number = 1  # the number of the step that ``next`` takes next
        self._found: StepAhead | None = None  # the plan that was found for it
        self._watch: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._patience: float | None = None
        self._proposal: Proposal | None = None
        self._plan: Plan | None = None

    def next(self) -> PackedStep:
        """The next step, in the order that was found for it while the one before ran. The first step is in the order in
        which it was packed. Raises StopIteration after the last step, PipelineError if the search or a rank has failed,
        and what ``lengths`` raises. After an error a later call takes the same step."""
        step = self._following
        if step is None:
            raise StopIteration("all steps of packed sequences have been taken")
        if self._asked and self._found is None:
            self._found = self._wait()
        found = self._found
        if found is not None:
            step = step.ordered(found.order)
        following = self._pack()
        self.current = step
        self._following = following
        self._proposal = None if found is None else found.proposal
        self._plan = None
        self._asked = 0
        self._found = None
        self._number += 1
        return step

    def _wait(self) -> StepAhead:
        """Wait for the answer of the search. Failures of other ranks are seen meanwhile."""
        began = time.monotonic()
        try:
            with self._watch() as guard:
                check = (lambda: None) if guard is None else guard.check
                return self._planner.answer(self._asked, self._patience, check)
        finally:
            self.waited += time.monotonic() - began

    def __call__(self) -> tuple[float, ...]:
        """The costs of the step that was taken last, for ``config.microbatch_costs``. Raises ScheduleInputError before
        the first."""
        return self._taken().costs

    def wait_under(self, watch: Callable[[], AbstractContextManager[Any]], patience: float) -> None:
        """``watch()`` is a context in which failures of other ranks are seen (``faults.attach.watched``); ``patience``:
        seconds that a search may take longer than the step before it."""
        self._watch = watch
        self._patience = patience

    def plan_ahead(self, spec: PlanSpec, **more: Any) -> None:
        """Begin to plan the next step. The training step that begins now asks for ``spec``; ``more`` are fields of
        NextStep. Raises ScheduleInputError for a step that was not taken by ``next``."""
        if self._asked:
            raise ScheduleInputError(
                "a training step begins, but its microbatches were not taken: before each step call next() of the "
                "PackedSteps that is config.microbatch_costs"
            )
        if self._following is not None:
            costs = self._following.costs
            self._planner.ask(self._number, NextStep(replace(spec, num_microbatches=len(costs)), costs, **more))
            self._asked = self._number

    def plan(self, run: PlanSpec) -> Plan | None:
        """The plan that was found for the step that was taken last, if it is for steps like ``run``. None if the
        settings' own plan runs."""
        if self._proposal is None or of_run(self._proposal.spec) != of_run(run):
            return None
        if self._plan is None:
            self._plan = self._proposal.plan()
        return self._plan

    def digest(self) -> str:
        """A digest of the last step's packs and their order, on which all ranks have to agree."""
        packs = [(pack.sequences, pack.lengths, pack.ranks) for slot in self._taken().slots for pack in slot.packs]
        return hashlib.sha256(repr(packs).encode()).hexdigest()[:16]

    def _taken(self) -> PackedStep:
        if self.current is None:
            raise ScheduleInputError("no step of packed sequences was taken yet; call next() before each training step")
        return self.current

    def _pack(self) -> PackedStep | None:
        if self._drawn is None:
            try:
                self._drawn = next(self._lengths, None)
            except BaseException as error:
                self._broken = f"{type(error).__name__}: {error}"
                raise
        if self._drawn is None:
            if self._broken:  # a generator that has raised looks like one that has ended
                raise PipelineError(f"the lengths of further steps cannot be had: they raised {self._broken}")
            return None
        following = packed(self._drawn, self.rules)
        self._drawn = None
        return following
