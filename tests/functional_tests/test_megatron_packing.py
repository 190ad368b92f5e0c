"""Packed sequences in a pipeline of Megatron-core's GPTModel: microbatches of different lengths and context sizes."""

from __future__ import annotations

import dataclasses

import pytest

from tests.functional_tests.megatron_support import needs_megatron

from testkit.megatron.cases import Case, Job, Model  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip

pytestmark = needs_megatron

CHECK = "tests.functional_tests.megatron_packing_checks:packs_over_context_sizes"
RECIPE = "tests.functional_tests.megatron_packing_checks:updates_of_the_recipe"
PACKED = Model(layers=4, seq=16, position="learned_absolute", per_token_loss=True)
STAGES = Case(PACKED, pp=2, dp=2, policy="batched", deallocate=False, variable_shapes=True)
CASES = {"1f1b": STAGES, "virtual stages": dataclasses.replace(STAGES, vp=2, policy="overlap")}


@pytest.mark.parametrize("name", CASES)
def test_packs_over_context_sizes_have_the_numbers_of_megatrons_schedule_and_of_one_process(name: str) -> None:
    (outcome,) = run_jobs([Job(CASES[name], check=CHECK, deadline=200.0)])
    assert outcome.status == "ok", outcome.message
    assert all(facts == outcome.facts[0] for facts in outcome.facts)
    for contexts, _ in outcome.facts[0]:
        assert {*contexts} == {1, 2}
    assert [searched for _, searched in outcome.facts[0]] == [False, True, True]


@pytest.mark.parametrize("name", CASES)
def test_the_recipe_of_an_update_has_the_gradients_of_megatrons_schedule(name: str) -> None:
    (outcome,) = run_jobs([Job(CASES[name], check=RECIPE, deadline=200.0)])
    assert outcome.status == "ok", outcome.message
    assert len(outcome.facts[0]) == 3
    assert min(min(largest) for largest in outcome.facts) > 1e-3
