"""Plan mutants: whatever harm one wrong instruction does, ``verify`` refuses it; what it lets pass gives equal bits on
a hostile network.

A run tries half of the mutants, drawn with a fixed seed. ``MEGATRON_PP_EXHAUSTIVE=1`` tries all, of every rank of a
plan instead of one, with eight places for every instruction instead of two, under every combination of policy,
channels, and fixed and varying shapes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from megatron_pp.errors import PipelineError, PlanError
from megatron_pp.feature_table import CACHES
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import CHANNELS, EXPLICIT, HOOKS, POLICIES, Plan, PlanSpec
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.testing.adversarial_transports import HOSTILE_NETWORKS
from megatron_pp.testing.toy import TOY_SCHEDULES, ToyResult, reference_run
from testkit.mutants.plan_mutants import KINDS, mutants
from testkit.sweeps import EXHAUSTIVE
from testkit.thread_runs.race_support import exact_block, exact_data, network_for, run_plan

MICROBATCHES = 4


def specs_of(schedule: str) -> list[PlanSpec]:
    """Every policy, with the other choices spread over schedules and policies; all combinations when exhaustive."""
    turn, slices = list(TOY_SCHEDULES).index(schedule), 2 if TOY_SCHEDULES[schedule].sliced else 1
    choices = [(p, c, v) for p in POLICIES for c in CHANNELS for v in (False, True)]
    if not EXHAUSTIVE:
        choices = [choices[4 * i + (turn + i) % 4] for i in range(len(POLICIES))]
    return [
        PlanSpec(
            schedule,
            pipeline_size=2 if EXHAUSTIVE or (turn + i) % 3 else 3,
            num_chunks=TOY_SCHEDULES[schedule].chunks or 2,
            num_microbatches=MICROBATCHES // slices,
            policy=policy,
            channels=channels,
            variable_shapes=variable and slices == 1,
            grad_sync=(HOOKS, EXPLICIT)[(turn // 4 + i) % 2],  # with fixed and with variable shapes
            param_sync=True,
            slices=slices,
        )
        for i, (policy, channels, variable) in enumerate(choices)
    ]


def sampled(plan: Plan, turn: int) -> Iterator[tuple[str, Plan]]:
    """Half of the mutants of one rank; as ``turn`` counts up, of each rank in turn. Of all ranks when exhaustive."""
    if EXHAUSTIVE:
        return mutants(plan, random.Random(4047), 8)
    drawn = random.Random(turn)
    return (one for one in mutants(plan, random.Random(4047), 2, [turn % len(plan.programs)]) if drawn.random() < 0.5)


class Judge:
    """Decides what becomes of each mutant of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.data = exact_data(plan.spec.num_microbatches, plan.spec.variable_shapes)
        self.expected = reference_run(plan.placement.num_stages, self.data, block=exact_block(plan.spec))
        self.run = 0

    def verdict(self, mutant: Plan) -> str:
        """``verify`` where it is refused, ``harmless`` where a run over a hostile network shows that, else what went
        wrong.
        """
        try:
            verify(mutant)
        except PlanError:
            return "verify"
        self.run += 1
        kind = HOSTILE_NETWORKS[self.run % len(HOSTILE_NETWORKS)]
        network = network_for(mutant, kind, seed=self.run, pollable=self.run % 2 == 0)
        try:
            outcome = run_plan(mutant, self.data, network)
        except (PipelineError, RuntimeError, KeyError, AssertionError) as error:
            return f"{kind.__name__}: {type(error).__name__}: {error}"
        return self._harm(outcome.result, outcome.complaints + network.violations) or "harmless"

    def _harm(self, result: ToyResult, complaints: list[str]) -> str:
        off = result.difference(self.expected)
        return f"gradients off by {off}" if off else "; ".join(complaints)


def specs_with_named_tensors(schedule: str) -> list[PlanSpec]:
    """Every policy, with one choice of cache and channels each."""
    size, chunks, tensors = (3, 1, "a=0>2; m=0>1,2 no_grad") if schedule == "1f1b" else (2, 2, "blocks")
    more = [{"policy": p, "channels": CHANNELS[i % 2], "skip_cache": CACHES[i]} for i, p in enumerate(POLICIES)]
    return [PlanSpec(schedule, size, chunks, MICROBATCHES, skip_tensors=tensors, **one) for one in more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "specs"),
    [
        *((schedule, specs_of) for schedule in TOY_SCHEDULES),
        *((schedule, specs_with_named_tensors) for schedule in ("1f1b", "zb_v")),
    ],
)
def test_every_harmful_plan_mutant_is_refused(
    schedule: str, specs: Callable[[str], list[PlanSpec]], capsys: pytest.CaptureFixture[str]
) -> None:
    count: Counter[tuple[str, str]] = Counter()
    escaped = []
    for turn, spec in enumerate(specs(schedule), list(TOY_SCHEDULES).index(schedule) * (specs is specs_of)):
        plan = build_plan(spec)
        judge = Judge(plan)
        for what, mutant in sampled(plan, turn):
            verdict = judge.verdict(mutant)
            kind = what.split(":")[0]
            if verdict in ("verify", "harmless"):
                count[kind, verdict] += 1
            else:
                escaped.append(f"{spec.describe()}: {what}: {verdict}")
    assert not escaped, f"{len(escaped)} harmful mutants pass verify:\n" + "\n".join(escaped[:20])
    assert all(count[kind, "verify"] for kind in KINDS)
    summary = ", ".join(f"{k} {count[k, 'verify']} + {count[k, 'harmless']}" for k in KINDS)
    with capsys.disabled():
        print(f"\nplan mutants of {schedule}, refused by verify + harmless when run: {summary}; escaped 0")


@pytest.mark.slow
def test_the_judge_sees_harm_that_verify_would_miss() -> None:
    """A run over a hostile network separates harmful mutants from harmless ones: here with verify out of the way."""
    plan = build_plan(PlanSpec("1f1b", 2, 1, MICROBATCHES))
    judge = Judge(plan)
    harmless = wrong = 0
    for _, mutant in mutants(plan, random.Random(1)):
        try:
            outcome = run_plan(mutant, judge.data, network_for(mutant, HOSTILE_NETWORKS[1], seed=1))
        except Exception:  # an engine that is given nonsense may fail in any way
            wrong += 1
            continue
        harm = judge._harm(outcome.result, outcome.complaints)
        wrong += bool(harm)
        harmless += not harm
    assert wrong > 100
    assert harmless > 10
