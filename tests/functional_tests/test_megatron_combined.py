"""Combined 1F1B (`overlap_moe_expert_parallel_comm`) on a small mixture of experts, EP 2 x PP 2: the numbers of
Megatron's own combined schedule to the last bit, also where that has no such schedule, and one order of all-to-alls.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.functional_tests.megatron_support import needs_megatron

from testkit.megatron.cases import Case, Job, Model  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip

pytestmark = [needs_megatron, pytest.mark.slow]

MOE = Model(layers=4, experts=4)
TRAINED = {"optimizer": "adam", "clip_grad": 0.0, "steps": 2, "microbatches": 4}
CASES = {
    "virtual stages": Case(MOE, pp=2, vp=2, dp=2, ep=2, **TRAINED),
    "no pipeline": Case(MOE, dp=2, ep=2, **TRAINED),
}
OTHER_ORDERS = ("no virtual stages", "dualpipe_v, split")
OURS = {
    "virtual stages": ("overlap+flush", "batched, recomputed", *OTHER_ORDERS, "delay_wgrad_compute"),
    "no pipeline": ("alone",),
}


@pytest.fixture(scope="module", params=CASES)
def facts(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    job = Job(CASES[request.param], check="testkit.megatron.combined:parities", deadline=240.0)
    (outcome,) = run_jobs([job])
    assert outcome.status == "ok", outcome.message
    return request.param, outcome.facts


def test_losses_gradients_and_parameters_are_megatrons(facts: tuple[str, list[dict[str, Any]]]) -> None:
    name, ranks = facts
    assert len(ranks) == CASES[name].world
    for rank in ranks:
        assert rank["size"] > 0.1
        assert {way: rank[way]["differences"] for way in OURS[name]} == dict.fromkeys(OURS[name], [0.0] * 3)


def test_combined_1f1b_equals_one_process_within_rounding(facts: tuple[str, list[dict[str, Any]]]) -> None:
    """An expert adds up the tokens of two ranks in one product, where one process adds two products. Adam divides
    gradients by their size, also those of 1e-9."""
    for rank in facts[1]:
        losses, gradients, parameters = rank["single"]
        assert losses < 1e-6
        assert gradients < 1e-6
        assert parameters < 1e-4


def test_gradients_are_sent_before_the_last_weight_gradients(facts: tuple[str, list[dict[str, Any]]]) -> None:
    """Megatron's schedule plans compute the weight gradients of the first layer's attention after the send."""
    name, ranks = facts
    if name == "virtual stages":
        sending = [rank["delay_wgrad_compute"]["weight gradients to come at sends"] for rank in ranks]
        assert all(count == 2 for count in sending), sending


def test_all_to_alls_are_in_one_order_across_the_expert_parallel_group(
    facts: tuple[str, list[dict[str, Any]]],
) -> None:
    name, ranks = facts
    for rank in ranks:
        assert rank["all-to-alls"] > 0
        for way in OURS[name]:
            assert rank[way]["one order"]
            assert rank[way]["all-to-alls"] == rank["all-to-alls"]
            assert rank[way]["Megatron's order"] == (way not in OTHER_ORDERS)
