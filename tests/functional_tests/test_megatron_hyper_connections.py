"""Megatron's models with hyper-connections, whose stages give each other several streams of the hidden size.

The branch dev of Megatron-LM has them under pipelines. Releases up to 0.19 have none. The main branch of August 2026
refuses them with a pipeline. `MEGATRON_CHECKOUT` names a folder with another Megatron than the installed one.
"""

from __future__ import annotations

import os

import pytest

from testkit.megatron import groups
from testkit.megatron.cases import Case, Model, Outcome
from tests.functional_tests.megatron_support import assert_equal, beside_megatrons_schedule, schedules_source

CHECKOUT = os.environ.get("MEGATRON_CHECKOUT", "")
FIELD = "enable_hyper_connections"


pytestmark = pytest.mark.skipif(
    FIELD not in schedules_source(CHECKOUT),
    reason="hyper-connections under pipelines are on Megatron's branch dev alone",
)
MODEL = Model(layers=4, extra_config=((FIELD, True), ("num_residual_streams", 3)))
CUTS = {"2 stages": (2, None), "4 stages": (4, None), "2 ranks, 2 chunks each": (2, 2)}
CASES = {
    f"{name}, {policy}": Case(MODEL, pp=pp, vp=vp, policy=policy, steps=2, optimizer="adam")
    for name, (pp, vp) in CUTS.items()
    for policy in groups.POLICIES
} | {"2 stages, zb_h1": Case(MODEL, pp=2, schedule="zb_h1", policy="overlap", steps=2, optimizer="adam")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    return beside_megatrons_schedule(CASES.values(), tmp_path_factory.mktemp("references"), CHECKOUT)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_parameters_are_those_of_megatrons_schedule(
    name: str, outcomes: dict[Case, Outcome]
) -> None:
    assert_equal(outcomes[CASES[name]])
