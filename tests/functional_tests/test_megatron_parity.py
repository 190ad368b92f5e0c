"""Megatron-core's real GPTModel cut into pipelines, under this engine: losses and gradients equal one process exactly.

A part of the matrix that scripts/parity_table.py runs in full. The cases that released Megatron-core gets wrong are
all here: P=2 V=2 batched, and overlap with freed outputs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.functional_tests.megatron_support import assert_equal, needs_megatron

from testkit.megatron.cases import POLICIES, Case, Job, Model, Outcome  # isort: skip
from testkit.megatron.runner import parity_jobs, run_jobs  # isort: skip

pytestmark = needs_megatron

TIED = Model(tied=True, position="learned_absolute")
MOE = Model(layers=4, experts=4)


# For each policy: do shapes vary, are outputs kept, are groups large? Any two of these have all four combinations.
CHOICES = dict(zip(POLICIES, [(1, 1, 1), (0, 1, 0), (1, 0, 0), (0, 0, 1)], strict=True))


def chosen_cases() -> list[Case]:
    """Return the cases: on two cuts every policy with its defaults, in training and forward-only; on the other two cuts
    with tied embeddings and the choices of the policy, one of them with the opposite choices."""
    cases = []
    for pp in (2, 4):
        for vp, policy in ((vp, policy) for vp in (None, 2) for policy in POLICIES):
            flip = (pp == 4) != (vp is not None)
            variable, keep, large = (bool(choice) != flip for choice in CHOICES[policy])
            case = Case(Model(layers=2 * pp), pp=pp, vp=vp, policy=policy)
            if (pp == 4) == (list(POLICIES).index(policy) % 2 == 0):
                model = dataclasses.replace(TIED, layers=2 * pp)
                tied = dataclasses.replace(case, model=model, variable_shapes=variable, deallocate=not keep)
                cases.append(dataclasses.replace(tied, group=6 if vp and large else None))
            else:
                cases += [case, dataclasses.replace(case, forward_only=True, variable_shapes=not variable)]
        cases.append(Case(pp=pp, vp=2, policy="overlap", microbatches=pp - 1))
        cases.append(Case(pp=pp, policy="overlap", microbatches=1))
    for per_token in (False, True):
        for cut in (Case(pp=2, policy="batched"), Case(pp=2, vp=2, policy="overlap")):
            cases.append(dataclasses.replace(cut, model=dataclasses.replace(MOE, per_token_loss=per_token)))
    cases.append(Case(model=Model(layers=4), pp=1, policy="plain"))
    cases += [Case(pp=4, policy="overlap", schedule=name) for name in ("gpipe", "eager_1f1b")]
    cases.append(Case(pp=2, vp=2, policy="overlap", schedule="breadth_first"))
    return sorted((case if case.group else case.short() for case in cases), key=lambda case: case.world)


def name_of(case: Case) -> str:
    parts = [case.label(), f"M={case.microbatches}"]
    if case.model.experts:
        parts.append("moe")
    if case.model.per_token_loss:
        parts.append("per token")
    if case.schedule:
        parts.append(case.schedule)
    return " ".join(parts)


CASES = chosen_cases()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    jobs = parity_jobs(CASES, tmp_path_factory.mktemp("references"))
    return {job.case: outcome for job, outcome in zip(jobs, run_jobs(jobs, deadline=400), strict=True)}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_losses_and_gradients_equal_one_process(case: Case, outcomes: dict[Case, Outcome]) -> None:
    assert_equal(outcomes[case])


def test_the_reference_with_tied_embeddings_equals_one_shared_parameter(tmp_path: Path) -> None:
    """The reference keeps the two gradients of tied embeddings apart until the end.

    Their sum equals the gradient of the shared parameter up to rounding.
    """
    apart = Case(model=TIED, engine="megatron", deallocate=False, split_tied=True)
    shared = dataclasses.replace(apart, split_tied=False)
    path = str(tmp_path / "apart.pt")
    _, outcome = run_jobs([Job(apart, save=path), Job(shared, reference=path)], deadline=60)
    assert outcome.status == "ok", outcome.message
    assert outcome.loss_difference == 0.0
    assert outcome.grad_difference is not None
    assert outcome.grad_difference < 1e-6 * outcome.grad_size


def test_the_comparison_sees_what_released_megatron_gets_wrong(tmp_path: Path) -> None:
    """Without this, a harness that compares nothing would pass the whole matrix."""
    case = Case(engine="megatron", pp=2, vp=2, policy="batched").short()
    *_, outcome = run_jobs(parity_jobs([case], tmp_path), deadline=60)
    assert outcome.status == "ok", outcome.message
    assert outcome.grad_difference is not None
    assert outcome.grad_difference > 1.0
