"""Split backwards of Megatron-core's own layers: GPTModel and its tensor-parallel linear layers under zero bubble.

Gradients are compared in ``main_grad`` of Megatron's DistributedDataParallel, to the last bit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.functional_tests.megatron_support import assert_equal, needs_megatron

from testkit.megatron.cases import Case, Job, Model, Outcome  # isort: skip
from testkit.megatron.runner import parity_jobs, run_jobs  # isort: skip

pytestmark = needs_megatron

SPLIT = Case(Model(layers=4), split_weight_grad=True, policy="overlap")
TIED = Model(layers=4, tied=True, position="learned_absolute")
EXPERTS = Model(layers=4, experts=4)
# The output layer's own backward is fused, and Megatron computes its weight gradients after the step.
DEFERRED = Model(
    layers=4, extra_config=(("defer_embedding_wgrad_compute", True), ("gradient_accumulation_fusion", True))
)

ONE_RANK_WIDE = [
    case.short()
    for case in (
        dataclasses.replace(SPLIT, pp=2, schedule="zb_h1"),
        dataclasses.replace(SPLIT, pp=2, schedule="zb_h1", policy="batched", variable_shapes=True),
        dataclasses.replace(SPLIT, pp=2, schedule="zb_h2", model=TIED),
        dataclasses.replace(SPLIT, pp=2, vp=2, schedule="interleaved_zb"),
        dataclasses.replace(SPLIT, pp=2, vp=2, schedule="interleaved_zb", policy="plain", model=TIED),
        dataclasses.replace(SPLIT, pp=2, schedule="auto"),
        dataclasses.replace(SPLIT, pp=2, schedule="zb_h1", model=EXPERTS),
        dataclasses.replace(SPLIT, pp=4, schedule="zb_h1"),
        # install() converts the layers
        dataclasses.replace(SPLIT, pp=2, vp=2, schedule="interleaved_zb", split_weight_grad=False),
        dataclasses.replace(SPLIT, schedule="zb_h1", split_weight_grad=False),  # no pipeline: nothing is converted
        dataclasses.replace(SPLIT, pp=4, schedule="1f1b"),  # converted, and every backward whole
    )
]

# Megatron's own 1F1B and interleaved 1F1B at the same cut, with an optimizer, and ours on its zero-bubble order.
# With tensor parallelism Megatron's layers run sequence parallel.
FOUR_LAYERS = Case(Model(layers=4), engine="megatron", deallocate=False, microbatches=5, optimizer="adam", steps=2)
CUTS = [
    dataclasses.replace(FOUR_LAYERS, pp=2, tp=2),
    dataclasses.replace(FOUR_LAYERS, pp=2, tp=2, vp=2, microbatches=4),
    dataclasses.replace(FOUR_LAYERS, pp=2, tp=2, model=EXPERTS),
    dataclasses.replace(FOUR_LAYERS, pp=2, vp=2, model=EXPERTS, microbatches=4),
    dataclasses.replace(FOUR_LAYERS, pp=2, vp=2, model=DEFERRED, microbatches=4),
    dataclasses.replace(FOUR_LAYERS, pp=4),
    dataclasses.replace(FOUR_LAYERS, pp=4, vp=2, model=Model(layers=8), microbatches=8),
    dataclasses.replace(FOUR_LAYERS, pp=2, dp=2, overlap_grad_reduce=True, optimizer="distributed"),
    dataclasses.replace(FOUR_LAYERS, pp=2, dp=2),
]
# On eight processes.
WIDE_CUT = dataclasses.replace(FOUR_LAYERS, pp=4, tp=2, vp=2, model=Model(layers=8, experts=4), microbatches=8)


def _name(case: Case) -> str:
    kind = " moe" if case.model.experts else " deferred" if case.model is DEFERRED else ""
    return f"{case.schedule or 'as Megatron'} {case.label()}{kind}"


def _split(case: Case) -> Case:
    """Return the case with split backwards. With data parallelism `install()` converts chunks at the first step."""
    schedule = "interleaved_zb" if case.vp else "zb_h1"
    by_script = case.dp == 1
    return dataclasses.replace(
        case, engine="ours", schedule=schedule, split_weight_grad=by_script, policy="overlap", deallocate=True
    )


def _compared_with_megatron(cases: list[Case], directory: Path) -> dict[Case, Outcome]:
    jobs = []
    for number, case in enumerate(cases):
        path = str(directory / f"whole{number}-{{rank}}.pt")
        jobs += [Job(case, save=path), Job(_split(case), reference=path)]
    return {job.case: outcome for job, outcome in zip(jobs, run_jobs(jobs, deadline=400), strict=True)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    directory = tmp_path_factory.mktemp("references")
    jobs = parity_jobs(ONE_RANK_WIDE, directory)
    single = {job.case: outcome for job, outcome in zip(jobs, run_jobs(jobs, deadline=400), strict=True)}
    return {**single, **_compared_with_megatron(CUTS, directory)}


@pytest.mark.parametrize("case", ONE_RANK_WIDE, ids=_name)
def test_split_gradients_equal_one_process(case: Case, outcomes: dict[Case, Outcome]) -> None:
    assert_equal(outcomes[case])


@pytest.mark.parametrize("case", CUTS, ids=_name)
def test_losses_gradients_and_parameters_equal_megatrons_own_schedule(
    case: Case, outcomes: dict[Case, Outcome]
) -> None:
    outcome = outcomes[_split(case)]
    assert_equal(outcome)
    assert outcome.param_difference == 0.0


@pytest.mark.slow
def test_eight_ranks_equal_megatrons_own_schedule(tmp_path: Path) -> None:
    outcome = _compared_with_megatron([WIDE_CUT], tmp_path)[_split(WIDE_CUT)]
    assert_equal(outcome)
    assert outcome.param_difference == 0.0


# -- layers ------------------------------------------------------------------------------------------------------------

CHECKS = "tests.functional_tests.megatron_layer_checks"


def test_tensor_parallel_layers_in_every_form() -> None:
    """The forms: sequence parallelism, biases, fusion, experts and frozen weights, on two ranks."""
    (outcome,) = run_jobs([Job(Case(tp=2), check=f"{CHECKS}:tensor_parallel_layers")], deadline=120)
    assert outcome.status == "ok", outcome.message
    assert len(outcome.facts[0]) == 2 * 3 * 2 * 2 * 4
    assert min(outcome.facts[0].values()) >= 2


def test_grouped_experts_defer_their_weight_gradients() -> None:
    """Each product runs once: outputs in F, input gradients in B, weight gradients in W."""
    (outcome,) = run_jobs([Job(Case(), check=f"{CHECKS}:grouped_experts")], deadline=120)
    assert outcome.status == "ok", outcome.message
    if not outcome.facts[0]:
        pytest.skip("this release of Megatron-core has no GroupedMLP")
    ran = ["output"] * 4 + ["input"] * 4 + ["weight"] * 4
    assert outcome.facts[0] == dict.fromkeys(("recompute=False", "recompute=True"), ran)


def test_only_routers_of_a_gpt_keep_whole_backwards() -> None:
    jobs = [Job(Case(model), check=f"{CHECKS}:whole_layers") for model in (Model(), Model(layers=2, experts=4))]
    dense, experts = run_jobs(jobs, deadline=120)
    assert (dense.status, experts.status) == ("ok", "ok"), (dense.message, experts.message)
    assert dense.facts[0] == []
    # Elements per token: the router, attention, and two of four experts; then the head.
    layer = 16 * 4 + 16 * (48 + 16) + 2 * (2 * 16 * 64)
    share = 16 * 4 / (2 * layer + 16 * 48)
    assert experts.facts[0] == [[f"decoder.layers.{n}.mlp.router", "TopKRouter", share] for n in range(2)]
