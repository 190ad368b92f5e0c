"""Megatron's models with Attention Residuals, whose stages pass on the sums of all earlier blocks of layers.

The draft Megatron-LM#6840 of 2026 adds them to the branch dev. No release has them. Without virtual stages a message
holds the sum of each earlier block, so that messages grow from stage to stage. With virtual stages a rank keeps the
sums that it has seen; a message holds the others, and is padded to the width of the widest message.
`MEGATRON_CHECKOUT` names a folder with another Megatron than the installed one.
"""

from __future__ import annotations

import os

import pytest

from testkit.megatron import groups
from testkit.megatron.cases import Case, Model, Outcome
from tests.functional_tests.megatron_support import assert_equal, beside_megatrons_schedule, schedules_source

CHECKOUT = os.environ.get("MEGATRON_CHECKOUT", "")
FIELD = "enable_attention_residuals"

pytestmark = pytest.mark.skipif(
    FIELD not in schedules_source(CHECKOUT),
    reason="Attention Residuals are in a draft for Megatron's branch dev (Megatron-LM#6840)",
)
MODEL = Model(layers=8, extra_config=((FIELD, True), ("attn_res_block_layers", 1), ("attn_res_impl", "eager")))
CUTS = {
    "2 stages": (2, None),
    "4 stages": (4, None),
    "2 ranks, 2 chunks each": (2, 2),
    "2 ranks, 4 chunks each": (2, 4),
    "4 ranks, 2 chunks each": (4, 2),
}
CASES = {
    f"{name}, {policy}": Case(MODEL, pp=pp, vp=vp, policy=policy, steps=2, optimizer="adam")
    for name, (pp, vp) in CUTS.items()
    for policy in groups.POLICIES
} | {
    "4 stages, zb_h1": Case(MODEL, pp=4, schedule="zb_h1", policy="overlap", steps=2, optimizer="adam"),
    "2 ranks, 2 chunks each, interleaved_zb": Case(
        MODEL, pp=2, vp=2, schedule="interleaved_zb", policy="overlap", steps=2, optimizer="adam"
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    return beside_megatrons_schedule(CASES.values(), tmp_path_factory.mktemp("references"), CHECKOUT)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_parameters_are_those_of_megatrons_schedule(
    name: str, outcomes: dict[Case, Outcome]
) -> None:
    assert_equal(outcomes[CASES[name]])
