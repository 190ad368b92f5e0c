"""Programs that call Megatron's schedules: Megatron's own wrappers, and imitations of verl and slime, with several
models in one process and forward-only calls between steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.functional_tests.megatron_support import in_megatrons_process, needs_megatron

from testkit.megatron.cases import Case, Job, Model, Outcome  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip

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
WRAPPERS = ("whole_step_wrapper", "stash_runner", "reloaded_groups")
SWAPPED = {
    "interleaved_1f1b": dataclasses.replace(VIRTUAL, optimizer=None),
    "zb_v": dataclasses.replace(VIRTUAL, optimizer=None, schedule="zb_v"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    jobs = {
        f"{check}, {name}": Job(case, check=f"tests.functional_tests.caller_checks:{check}")
        for check in (*CHECKS, *WRAPPERS)
        for name, case in CASES.items()
        if check in CHECKS or not case.variable_shapes
    }
    jobs |= {
        f"swapped_chunks, {name}": Job(case, check="tests.functional_tests.caller_checks:swapped_chunks")
        for name, case in SWAPPED.items()
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


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.variable_shapes])
@pytest.mark.parametrize("check", WRAPPERS)
def test_wrappers_of_megatrons_pass_a_list_of_one_iterator(check: str, name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[f"{check}, {name}"]
    assert outcome.status == "ok", outcome.message
    for facts in outcome.facts:
        if check == "whole_step_wrapper":
            assert "CUDA graphs of a whole iteration" in facts[1]
        assert (facts[0] if isinstance(facts, list) else facts) > 10


def test_a_mode_of_reruns_that_megatron_cannot_run_itself() -> None:
    """`--rerun-mode report_stats` is no value of the mode that Megatron's training script makes of it."""
    rerun: Any = pytest.importorskip("megatron.core.rerun_state_machine")
    with pytest.raises(ValueError, match="report_stats"):
        rerun.RerunMode("report_stats")


def hyper_connections_in_a_pipeline(case: Case) -> str:
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = {"enable_mhc_connections": True, "pipeline_model_parallel_size": 2}
    if not hasattr(TransformerConfig, "enable_mhc_connections"):
        return "unknown"
    with pytest.raises(NotImplementedError) as refused:
        TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32, **fields)
    return str(refused.value)


def test_hyper_connections_in_a_pipeline_are_refused_by_megatrons_config() -> None:
    """In a release that has hyper-connections, no step of such a model reaches a schedule."""
    said = in_megatrons_process(hyper_connections_in_a_pipeline)
    if said == "unknown":
        pytest.skip("this release of Megatron-core has none")
    assert "enable_mhc_connections does not support pipeline_model_parallel_size > 1" in said


@pytest.mark.parametrize("schedule", SWAPPED)
def test_gpt_models_in_the_wrong_order_are_an_error_on_every_rank(schedule: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[f"swapped_chunks, {schedule}"]
    assert outcome.status == "ok", outcome.message
    own, peer = outcome.facts
    sentence = f"chunk 0 on rank 0 is stage 0 under {schedule}: build it with stage_numbers; this one was built with vp"
    assert own.startswith(f"ScheduleInputError: {sentence}")
    assert peer.startswith("PipelinePeerError")
    assert sentence in peer
