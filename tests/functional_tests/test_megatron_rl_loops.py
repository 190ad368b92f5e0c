"""verl's and slime's ways of calling the schedules: several models in one process, forward-only between steps."""

from __future__ import annotations

import dataclasses

import pytest

from tests.functional_tests.megatron_support import needs_megatron

from tests.megatron.cases import Case, Job, Model, Outcome  # isort: skip
from tests.megatron.runner import run_jobs  # isort: skip

pytestmark = needs_megatron

LAYERS = Model(layers=4)
ALONE = Case(LAYERS, microbatches=4, optimizer="adam")
PIPELINE = dataclasses.replace(ALONE, pp=2, policy="batched")
VIRTUAL = dataclasses.replace(ALONE, pp=2, vp=2, policy="overlap", deallocate=False)
CASES = {
    "without a pipeline": ALONE,
    "a pipeline": PIPELINE,
    "a pipeline, lengths vary": dataclasses.replace(PIPELINE, variable_shapes=True),
    "virtual stages": VIRTUAL,
    "virtual stages, lengths vary": dataclasses.replace(VIRTUAL, variable_shapes=True),
}
CHECKS = ("verl", "slime")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    jobs = {
        f"{check}, {name}": Job(case, check=f"tests.functional_tests.rl_checks:{check}")
        for check in CHECKS
        for name, case in CASES.items()
    }
    return dict(zip(jobs, run_jobs(list(jobs.values()), deadline=200), strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check", CHECKS)
def test_calls_give_the_same_bits_as_under_megatrons_schedules(
    check: str, name: str, outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes[f"{check}, {name}"]
    assert outcome.status == "ok", outcome.message
    assert min(outcome.facts) > 10
