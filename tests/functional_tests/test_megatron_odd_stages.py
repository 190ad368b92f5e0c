"""Odd models in odd programs have the bits of Megatron's schedules under this engine. Each run draws a few of them."""

from __future__ import annotations

import itertools

import pytest

from tests.functional_tests.megatron_support import needs_megatron
from tests.functional_tests.numbers.odd_models import CASES

from testkit import autograd_draw, sweeps  # isort: skip
from testkit.megatron.cases import Case, Job, Model, Outcome  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip

pytestmark = needs_megatron

# Megatron's schedules wait for a gradient that these stages do not give, or take no such output.
_NOT_UNDER_MEGATRON = (
    "Probe",
    "ProbeWithin",
    "Constant",
    "Several",
    "Half",
    "used later",
    "Autocast",
    "Sparse",
    "Reused",
)
NAMES = [name for name, case in CASES.items() if not case.rounds and name not in _NOT_UNDER_MEGATRON]
DRAWN = sweeps.drawn(itertools.product(NAMES, (None, 2)), 8)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int | None], Outcome]:
    check = "tests.functional_tests.odd_stage_checks:odd_stages"
    models = [Model(extra_config=((name, autograd_draw.said()),)) for name, _ in DRAWN]
    jobs = [Job(Case(model, pp=2, vp=chunks), check=check) for model, (_, chunks) in zip(models, DRAWN, strict=True)]
    return dict(zip(DRAWN, run_jobs(jobs, deadline=200), strict=True))


@pytest.mark.parametrize(("name", "chunks"), DRAWN)
def test_reports_and_gradients_are_those_of_megatrons_schedule(
    name: str, chunks: int | None, outcomes: dict[tuple[str, int | None], Outcome]
) -> None:
    outcome = outcomes[name, chunks]
    assert outcome.status == "ok", outcome.message
    assert min(outcome.facts) == 5 * (1 + (chunks or 1))
