"""Gradient-sync marks: whatever one wrong mark does to a chunk's gradients, ``verify`` refuses it, for models that put
weight gradients off and for those that do all in B.

The oracle knows nothing of ``verify``: it runs a program's marks and counts how often each gradient is reduced.
``MEGATRON_PP_EXHAUSTIVE=1`` tries all mutants of all plans.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.features.output_layer.output_instructions import OUTPUT_T
from megatron_pp.plan.builder import build_plan, with_whole_backwards
from megatron_pp.plan.ir.instruction import (
    BACKWARD,
    BACKWARD_OPS,
    ENABLE_GRAD_SYNC,
    GRAD_SYNC,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Instruction,
    instruction,
)
from megatron_pp.plan.ir.spec import EXPLICIT, HOOKS, Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.verify.lifetime import check_rank
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import with_programs
from testkit.sweeps import EXHAUSTIVE

GRAD_MARKS = (ENABLE_GRAD_SYNC, GRAD_SYNC)
Program = tuple[Instruction, ...]


class Reductions:
    """How often each gradient of one rank is reduced: those of layers that split in the W of their backward, if it has
    one, those of the others in B."""

    def __init__(self, program: Sequence[Instruction], converted: bool, explicit: bool) -> None:
        self.split = {(at.chunk, at.mb) for at in program if at.op == WEIGHT_GRAD} if converted else set()
        self.explicit = explicit
        self.reduced: dict[tuple[int, str, int], int] = {}  # (chunk, kind of layer, microbatch) -> times
        self.enabled = self.closes = False
        for at in program:
            self._run(at)

    def _run(self, at: Instruction) -> None:
        if at.op == ENABLE_GRAD_SYNC:
            self.enabled = self.closes = True
        elif at.op == GRAD_SYNC and self.explicit:
            self._reduce(at.chunk, "whole")
            self._reduce(at.chunk, "split")
            self._reduce(at.chunk, "output layer")
            self.enabled = False
        elif at.op in BACKWARD_OPS or at.op in (WEIGHT_GRAD, OUTPUT_T):
            self._complete(at)
            if self.closes:
                self.enabled = self.closes = False

    def _complete(self, at: Instruction) -> None:
        if at.op == OUTPUT_T:
            self._add(at, "output layer")
            return
        puts_off = (at.chunk, at.mb) in self.split
        if at.op in BACKWARD_OPS:
            self._add(at, "whole")
        if puts_off if at.op == WEIGHT_GRAD else not puts_off:
            self._add(at, "split")

    def _add(self, at: Instruction, kind: str) -> None:
        self.reduced[at.chunk, kind, at.mb] = 0
        if self.enabled:
            self._reduce(at.chunk, kind)

    def _reduce(self, chunk: int, kind: str) -> None:
        for key in self.reduced:
            if key[:2] == (chunk, kind):
                self.reduced[key] += 1


def is_harmful(program: Sequence[Instruction], explicit: bool) -> bool:
    """Whether a gradient of either kind of model is not reduced exactly once."""
    return any(set(Reductions(program, converted, explicit).reduced.values()) != {1} for converted in (False, True))


def plans(schedule: str) -> Iterator[Plan]:
    """Small ones, with and without W."""
    for size in (1, 2, 3, 4) if EXHAUSTIVE else (1, 2, 3):
        for chunks in [SCHEDULES[schedule].chunks] if SCHEDULES[schedule].chunks else [1, 2]:
            for microbatches in (1, 2, 3, 4, 5) if EXHAUSTIVE else (1, 3):
                for sync in (HOOKS, EXPLICIT):
                    try:
                        plan = build_plan(PlanSpec(schedule, size, chunks, microbatches, grad_sync=sync))
                    except PlanError:
                        continue  # some families want more microbatches
                    yield plan
                    if SCHEDULES[schedule].splits_weight:
                        yield with_whole_backwards(plan)


def mutants(program: Program, chunks: int, rng: random.Random, most: int) -> Iterator[Program]:
    """One mark gone, one more, or one replaced by any other anywhere, each kind drawn equally often."""
    marks = [k for k, at in enumerate(program) if at.op in GRAD_MARKS]
    removed = [program, *(program[:k] + program[k + 1 :] for k in marks)]
    added = [instruction(op, chunk) for op in GRAD_MARKS for chunk in range(chunks + 1)]
    yield from removed[1:]
    places = [(rest, new, at) for rest in removed for new in added for at in range(len(rest) + 1)]
    for rest, new, at in places if EXHAUSTIVE else rng.sample(places, min(most, len(places))):
        yield (*rest[:at], new, *rest[at:])


def is_accepted(plan: Plan, rank: int, program: Program) -> bool:
    programs = (*plan.programs[:rank], plan.placement.place(rank, program), *plan.programs[rank + 1 :])
    try:
        check_rank(replace(plan, programs=programs), rank)
    except PlanError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_mutant_whose_gradients_are_not_reduced_once_is_accepted(schedule: str) -> None:
    rng = random.Random(3)
    refused, escaped = 0, []
    for plan in plans(schedule):
        verify(plan)
        explicit = plan.spec.grad_sync == EXPLICIT
        for rank, program in enumerate(plan.programs):
            assert not is_harmful(program, explicit)
            for mutant in mutants(program, plan.spec.num_chunks, rng, 12):
                if is_harmful(mutant, explicit):
                    refused += 1
                    if is_accepted(plan, rank, mutant):
                        escaped.append(f"{plan.spec.describe()} {plan.spec.grad_sync}, rank {rank}: {mutant}")
    assert not escaped, f"{len(escaped)} of {refused} harmful mutants pass:\n" + "\n".join(escaped[:10])
    assert refused > 100


@pytest.mark.parametrize(
    ("program", "sync", "words"),
    [
        ("F0.0 I0.0 W0.0 F0.1 I0.1 ENABLE_GRAD_SYNC0 W0.1", HOOKS, "I0.1 .*no ENABLE_GRAD_SYNC0 stands before it"),
        (
            "F0.0 B0.0 F0.1 ENABLE_GRAD_SYNC0 B0.1 GRAD_SYNC0",
            EXPLICIT,
            "ENABLE_GRAD_SYNC0 and GRAD_SYNC0: a rank synchronises its gradients by hooks",
        ),
        (
            "F0.0 I0.0 W0.0 F0.1 ENABLE_GRAD_SYNC0 I0.1 W0.1 GRAD_SYNC0",
            EXPLICIT,
            "ENABLE_GRAD_SYNC0 and GRAD_SYNC0: a rank synchronises its gradients by hooks",
        ),
    ],
)
def test_sync_mutants_that_were_accepted_once_are_refused(program: str, sync: str, words: str) -> None:
    plan = build_plan(PlanSpec("zb_h1", 1, 1, 2, grad_sync=sync))
    mutant = replace(with_programs(plan, program), orders=())
    with pytest.raises(PlanError, match=words):
        verify(mutant)


@pytest.mark.parametrize("schedule", [name for name, family in SCHEDULES.items() if family.splits_weight])
@pytest.mark.parametrize("policy", ["overlap", "batched", "plain"])
def test_plans_with_and_without_w_communicate_alike(schedule: str, policy: str) -> None:
    """Ranks whose models split backwards and ranks whose models do not run one schedule together."""
    family = SCHEDULES[schedule]
    count = 6 if family.search is None else 3  # two searches, of seconds each with more
    spec = PlanSpec(schedule, 3, family.chunks or 2, count, policy=policy)
    split, whole = build_plan(spec), build_plan(replace(spec, split_backward=False))
    ignored = {WEIGHT_GRAD, ENABLE_GRAD_SYNC, INPUT_GRAD, BACKWARD}
    for one, other in zip(split.programs, whole.programs, strict=True):
        assert [at for at in one if at.op not in ignored] == [at for at in other if at.op not in ignored]
        assert not any(at.op in (WEIGHT_GRAD, INPUT_GRAD) for at in other)
    verify(replace(split, programs=(split.programs[0], *whole.programs[1:]), orders=()))


def test_a_plan_without_w_may_not_hold_one() -> None:
    plan = build_plan(PlanSpec("zb_h1", 2, 1, 3))
    with pytest.raises(PlanError, match=r"I0\.0 .* has no such step in this plan"):
        verify(replace(plan, spec=replace(plan.spec, split_backward=False)))
