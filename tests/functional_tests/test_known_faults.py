"""Faults of Megatron-core's own schedules that `megatron-pp check` names, in the installed release."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from megatron_pp.integrations.megatron.releases.versions import release_of
from tests.functional_tests.megatron_support import needs_megatron

from testkit.megatron.cases import Case, Job, Model  # isort: skip
from testkit.megatron.runner import parity_jobs, run_jobs  # isort: skip

pytestmark = needs_megatron


def test_varying_shapes_on_two_ranks_crash_megatrons_schedule(tmp_path: Path) -> None:
    """The shapes of an output and of a gradient reach each other's receivers; gloo refuses what then arrives. This
    engine runs the same case."""
    theirs = Case(engine="megatron", pp=2, vp=2, policy="plain", variable_shapes=True).short()
    ours = dataclasses.replace(theirs, engine="ours")
    *_, crashed, right = run_jobs(parity_jobs([theirs, ours], tmp_path), deadline=120)
    assert crashed.status == "error", crashed.message
    assert (right.status, right.grad_difference) == ("ok", 0.0), right.message


def test_a_recomputed_mlp_with_a_bias_recomputes_itself_without_end() -> None:
    """The recursion happens without tensor parallelism too. The check ends it at a depth that no layer needs."""
    again = ("recompute_granularity", "selective"), ("recompute_modules", ("mlp",))
    models = [Model(layers=2, extra_config=(("add_bias_linear", bias), *again)) for bias in (True, False)]
    check = "tests.functional_tests.megatron_layer_checks:depth_of_recomputation"
    with_bias, without = run_jobs([Job(Case(model, microbatches=2), check=check) for model in models])
    assert (with_bias.facts, without.facts) == ([4], [1]), (with_bias.message, without.message)


def test_a_weight_without_gradients_stops_a_reduction_that_waits_for_it() -> None:
    """With multi-token prediction and tied embeddings, the last stage has a weight that nothing uses. Megatron's
    scripts align reductions by default: each stage then starts them after its last backward, and waits for no weight.
    """
    prediction = Model(layers=2, tied=True, extra_config=(("mtp_num_layers", 1),))
    theirs = Case(prediction, engine="megatron", pp=2, microbatches=2, steps=2, optimizer="adam", deallocate=False)
    theirs = dataclasses.replace(theirs, overlap_grad_reduce=True)
    untied = dataclasses.replace(theirs, model=dataclasses.replace(prediction, tied=False))
    aligned = dataclasses.replace(theirs, align_param_gather=True)  # and the reductions, as in the scripts
    afterwards = dataclasses.replace(theirs, overlap_grad_reduce=False)
    ours = dataclasses.replace(theirs, engine="ours", deallocate=True)
    cases = theirs, ours, untied, aligned, afterwards, dataclasses.replace(ours, align_param_gather=True)
    *stopped, _, _, _, _ = outcomes = run_jobs([Job(case, deadline=60.0) for case in cases])
    assert [(one.status, one.message[:23]) for one in stopped] == [("error", "rank 1: AssertionError:")] * 2
    assert [one.status for one in outcomes[2:]] == ["ok"] * 4, [one.message for one in outcomes]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_copy_of_the_embedding_gets_another_learning_rate_up_to_0_17(tied: bool) -> None:
    """Multi-token prediction has a copy of the embedding on the last stage. Older releases do not mark it as an
    embedding, so the two copies differ after one step with --decoupled-lr. The gradients of both are equal.
    """
    prediction = Model(layers=2, tied=tied, extra_config=(("mtp_num_layers", 1),))
    theirs = Case(prediction, engine="megatron", pp=2, microbatches=2, deallocate=False)
    cases = theirs, dataclasses.replace(theirs, engine="ours", deallocate=True)
    check = "tests.functional_tests.megatron_optimizer_checks:embedding_after_a_step"
    marked = release_of(importlib.metadata.version("megatron-core")) >= (0, 18)
    for outcome in run_jobs([Job(case, check=check) for case in cases]):
        first, last = outcome.facts
        assert first, outcome.message
        assert last
        assert (first == last) == marked, max(map(abs, map(float.__sub__, first, last)))


def _difference_of_routers(one: Case, other: Case) -> float:
    """The largest difference of a router's gradient between two cases, as a share of the largest gradient."""
    check = "tests.functional_tests.megatron_router_checks:router_gradients"
    outcomes = run_jobs([Job(case, check=check) for case in (one, other)])
    assert [outcome.status for outcome in outcomes] == ["ok"] * 2, [outcome.message for outcome in outcomes]
    first, second = ({name: grad for fact in outcome.facts for name, grad in fact.items()} for outcome in outcomes)
    assert first.keys() == second.keys()
    assert len(first) == one.model.layers
    pairs = [pair for name in first for pair in zip(first[name], second[name], strict=True)]
    return max(abs(a - b) for a, b in pairs) / max(abs(a) for a, _ in pairs)


@pytest.mark.parametrize("engine", ["megatron", "ours"])
@pytest.mark.parametrize("per_token", [True, False], ids=["per token", "per microbatch"])
def test_auxiliary_losses_per_token_are_divided_by_the_tensor_parallel_ranks_up_to_0_18(
    engine: str, per_token: bool
) -> None:
    experts = Model(layers=2, experts=4, per_token_loss=per_token)
    alone = Case(experts, engine="megatron", microbatches=2, deallocate=False)
    split = dataclasses.replace(alone, engine=engine, pp=2, tp=2, deallocate=engine == "ours")
    difference = _difference_of_routers(alone, split)
    right = not per_token or release_of(importlib.metadata.version("megatron-core")) >= (0, 19)
    assert difference < 1e-5 if right else difference > 0.05, difference


def test_auxiliary_losses_of_sequences_depend_on_the_size_of_microbatches_from_0_16_to_0_18() -> None:
    kind = ("moe_router_load_balancing_type", "seq_aux_loss"), ("moe_z_loss_coeff", None)
    sequences = Model(layers=2, experts=4, per_token_loss=True, micro_batch=1, extra_config=kind)
    single = Case(sequences, engine="megatron", microbatches=4, deallocate=False)
    double = dataclasses.replace(single, model=dataclasses.replace(sequences, micro_batch=2), microbatches=2)
    difference = _difference_of_routers(single, double)
    right = not (0, 16) <= release_of(importlib.metadata.version("megatron-core")) < (0, 19)
    assert difference < 1e-5 if right else difference > 0.05, difference
