"""The file of known faults, and the jobs that have them."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from typing import Any

import pytest

from megatron_pp.tools.check.findings import ERROR, NOTE, RISK
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.sizes import completed
from megatron_pp.tools.check.risks import (
    DERIVED,
    NOT_AFFECTED,
    SAME,
    KnownFault,
    known_faults,
    section,
    terms_of,
    values_of,
    version_of,
)
from megatron_pp.tools.flags.table import settings
from tests.conftest import PROJECT_ROOT

FAULTS = {fault.name: fault for fault in known_faults()[0]}

TWO = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
FOUR = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
FLUSH = {**FOUR, "overlap_p2p_comm_warmup_flush": True, "eval_iters": 10}
LATENT = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
QUERIES = {"qk_layernorm": True, "q_lora_rank": 1536, "tensor_model_parallel_size": 2}
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}
SINKS = {"softmax_type": "learnable", "tensor_model_parallel_size": 2}
DELTA = {"experimental_attention_variant": "gated_delta_net", "tensor_model_parallel_size": 2}
MASKED = {"context_parallel_size": 2, "sft": True}
MTP = {"mtp_num_layers": 1, "context_parallel_size": 2}
PREDICTION = {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "overlap_grad_reduce": True}
SHARDED = {"use_megatron_fsdp": True, "pipeline_model_parallel_size": 2, "ckpt_format": "fsdp_dtensor", "load": "a"}
PACKED = {"pipeline_model_parallel_size": 12, "sft": True}
ROUTED = {"num_experts": 8, "calculate_per_token_loss": True, "micro_batch_size": 2}
DENSE = {"num_experts": 8, "mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "moe_layer_freq": "([0]*8+[1]*8)"}
TUNED = {"pipeline_model_parallel_size": 3, "tensor_model_parallel_size": 2, "sft": True}
BETWEEN = {"pipeline_model_parallel_size": 4, "mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*8|t*8|m|L"}
ENDS = {"pipeline_model_parallel_size": 2, "num_layers": 48, "decoder_first_pipeline_num_layers": 11}

NEAR: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "batched-exchange-on-two-ranks": ({**TWO, "overlap_p2p_comm": False}, {"overlap_p2p_comm": True}, "0.19.2", ""),
    "varying-shapes-on-two-ranks": (
        {**TWO, "overlap_p2p_comm": False, "batch_p2p_comm": False, "variable_seq_lengths": True},
        {"overlap_p2p_comm": True},
        "0.19.2",
        "",
    ),
    "varying-shapes-in-long-pipelines": (
        {"pipeline_model_parallel_size": 4, "variable_seq_lengths": True},
        {"pipeline_model_parallel_size": 3},
        "0.19.2",
        "",
    ),
    "outputs-freed-before-they-are-sent": (FOUR, {"deallocate_pipeline_outputs": False}, "0.17.1", "0.18.0"),
    "evaluation-with-warmup-flush": (FLUSH, {"eval_iters": 0}, "0.16.1", "0.18.2"),
    "evaluation-with-warmup-flush-and-kept-outputs": (
        {**FLUSH, "deallocate_pipeline_outputs": False},
        {"deallocate_pipeline_outputs": True},
        "0.19.2",
        "0.17.1",
    ),
    "communicators-made-within-the-first-step": (FOUR, {"overlap_p2p_comm": False}, "0.19.2", ""),
    "shared-rotary-key-not-summed": (LATENT, {"sequence_parallel": True}, "0.19.2", ""),
    "fused-down-projection-under-tensor-parallelism": (
        {**LATENT, "sequence_parallel": True, "mla_down_proj_fusion": True},
        {"mla_down_proj_fusion": False},
        "0.19.2",
        "0.16.1",
    ),
    "norm-of-queries-summed-too-often": (
        {**QUERIES, "multi_latent_attention": True, "transformer_impl": "local"},
        {"sequence_parallel": True},
        "0.19.2",
        "",
    ),
    "norm-of-queries-summed-too-often-in-sparse-attention": (
        {**QUERIES, "experimental_attention_variant": "dsa"},
        {"sequence_parallel": True},
        "0.19.2",
        "0.18.2",
    ),
    "latent-projections-counted-by-each-rank-in-the-norm": (
        {**LATENT, "sequence_parallel": True},
        {"clip_grad": 0.0},
        "0.16.1",
        "0.17.0",
    ),
    "recomputed-mlp-with-bias": (AGAIN, {"recompute_modules": ["core_attn"]}, "0.19.2", ""),
    "attention-sinks-left-out-of-the-norm": (SINKS, {"clip_grad": 0.0}, "0.19.2", "0.14.0"),
    "gated-delta-net-norm-not-summed": (DELTA, {"sequence_parallel": True}, "0.19.2", "0.15.3"),
    "graphs-of-layers-reuse-what-a-backward-reads": (
        {"cuda_graph_impl": "local"},
        {"cuda_graph_impl": "transformer_engine"},
        "0.17.1",
        "0.18.0",
    ),
    "graphs-of-attention-under-combined-1f1b": (
        {
            "cuda_graph_impl": "transformer_engine",
            "overlap_moe_expert_parallel_comm": True,
            "pipeline_model_parallel_size": 2,
        },
        {"cuda_graph_impl": "none"},
        "0.19.2",
        "0.18.2",
    ),
    "offloaded-activations-read-before-they-are-written": (
        {"fine_grained_activation_offloading": True},
        {"fine_grained_activation_offloading": False},
        "0.19.2",
        "0.15.3",
    ),
    "auxiliary-losses-divided-by-tensor-parallel-ranks": (
        {**ROUTED, "tensor_model_parallel_size": 2, "moe_aux_loss_coeff": [0.0, 0.01]},
        {"moe_aux_loss_coeff": [0.0, 0.0]},
        "0.18.2",
        "0.19.0",
    ),
    "auxiliary-losses-of-sequences-divided-by-the-microbatch": (
        {**ROUTED, "moe_router_load_balancing_type": ["seq_aux_loss"]},
        {"micro_batch_size": 1},
        "0.16.1",
        "0.15.3",
    ),
    "logs-of-auxiliary-losses-with-multi-token-prediction": (DENSE, {"moe_layer_freq": 1}, "0.16.1", "0.17.0"),
    "sinkhorn-balances-each-rank-alone": (
        {"moe_router_load_balancing_type": ["sinkhorn"], "tensor_model_parallel_size": 2},
        {"moe_router_load_balancing_type": ["aux_loss"]},
        "0.19.2",
        "",
    ),
    "masked-loss-of-each-shard": (MASKED, {"calculate_per_token_loss": True}, "0.19.2", ""),
    "loss-without-tokens-is-nan": ({"sft": True}, {"calculate_per_token_loss": True}, "0.14.0", "0.15.0"),
    "mtp-counts-the-tokens-of-its-shard": (
        {**MTP, "calculate_per_token_loss": True},
        {"context_parallel_size": 1},
        "0.19.2",
        "0.16.1",
    ),
    "mtp-without-tokens-is-nan": (MTP, {"mtp_num_layers": 0}, "0.16.1", "0.17.0"),
    "prediction-with-tied-embeddings-and-unaligned-reduction": (
        {**PREDICTION, "align_grad_reduce": False},
        {"align_grad_reduce": True},
        "0.19.2",
        "",
    ),
    "copy-of-the-embedding-trained-as-a-matrix": (
        {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "optimizer": "muon"},
        {"optimizer": "adam"},
        "0.17.1",
        "0.18.0",
    ),
    "embedding-of-a-stage-between-the-ends": (
        BETWEEN,
        {"pipeline_model_parallel_layout": "Et*8|t*4|t*4|mL"},
        "0.19.2",
        "",
    ),
    "fsdp-checkpoint-of-another-pipeline": (SHARDED, {"load": None}, "0.19.2", ""),
    "layers-without-a-stage": (
        {**ENDS, "decoder_last_pipeline_num_layers": 13},
        {"decoder_last_pipeline_num_layers": 37},
        "0.15.3",
        "0.16.0",
    ),
    "packed-lengths-missing-on-middle-stages": (PACKED, {"pipeline_model_parallel_size": 2}, "0.19.2", ""),
    "packed-lengths-missing-on-middle-stages-of-megatrons-script": (
        PACKED,
        {"pipeline_model_parallel_size": 2},
        "0.16.1",
        "0.17.0",
    ),
    "packed-lengths-missing-on-tensor-parallel-ranks": (TUNED, {"tensor_model_parallel_size": 1}, "0.17.1", "0.18.0"),
}
"""Fault -> settings that meet it, the change that makes a near job which does not, a release that has it, and one that
has not ("": none is known)."""
BRIDGE = ("packed-lengths-missing-on-middle-stages", "embedding-of-a-stage-between-the-ends")


def a_job(given: Mapping[str, Any], release: str = "0.19.2", framework: str = "megatron") -> Job:
    gpus = given.get("pipeline_model_parallel_size", 1) * given.get("tensor_model_parallel_size", 1) * 2
    args = completed({"num_layers": 16, **given}, gpus * given.get("context_parallel_size", 1), {})
    return Job(framework, gpus, given, args, release=release)


def met_by(job: Job) -> list[str]:
    return [finding.name for finding in section(job).findings]


@pytest.mark.parametrize("name", FAULTS)
def test_a_job_meets_it_and_a_near_one_does_not(name: str) -> None:
    given, change, release, without = NEAR[name]
    framework = "megatron-bridge" if name in BRIDGE else "megatron"
    assert name in met_by(a_job(given, release, framework))
    assert name not in met_by(a_job({**given, **change}, release, framework))
    if without:
        assert name not in met_by(a_job(given, without, framework))


def test_an_ordinary_job_meets_none() -> None:
    plain = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2, "context_parallel_size": 2}
    answer = section(a_job(plain))
    assert answer.findings == ()
    assert answer.lines == ("this job has none of the known faults of Megatron-core 0.19.2",)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_rows_are_well_formed(fault: KnownFault) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", fault.name)
    assert {*fault.settings} <= {*settings(), *DERIVED}, fault.settings
    for thread in fault.threads:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", thread)
    for release in filter(None, (fault.since, fault.fixed)):
        assert re.fullmatch(r"0\.\d+\.\d+", release)
    assert bool(fault.shown) != bool(fault.unshown), "either it is shown, or the row says why not"
    assert fault.threads or fault.shown
    assert fault.change
    assert fault.what == fault.what.strip()
    assert not fault.what.endswith(".")


@pytest.mark.parametrize("fault", [one for one in FAULTS.values() if one.shown], ids=lambda one: one.name)
def test_the_test_named_by_a_known_fault_exists(fault: KnownFault) -> None:
    """``shown`` names a test that exists, or a row of a recorded table that has the fault."""
    file, test, function = fault.shown.partition("::")
    if test:
        assert f"def {function}(" in (PROJECT_ROOT / file).read_text(encoding="utf-8")
        return
    file, _, begins = fault.shown.partition(": ")
    with (PROJECT_ROOT / file).open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines) if ",".join(row).startswith(begins)]
    assert len(rows) == 1
    assert any(word in cell for cell in rows[0] for word in ("different", "hangs", "inf"))


def test_names_are_unique_and_all_have_a_near_job() -> None:
    assert len(FAULTS) == len(known_faults()[0])
    assert FAULTS.keys() == NEAR.keys()


@pytest.mark.parametrize("text", ["num_layers", "num_layers = 2", "a and b", "num_layers is even", "x == 1 or", ""])
def test_a_term_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a term; terms are"):
        terms_of(text)


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("a == 2", {"a": 2}, True),
        ("a >= 2", {}, False),
        ("a >= 1", {"a": True}, False),
        ("a != 2", {"a": None}, False),
        ("a == learnable", {"a": "learnable"}, True),
        ("a == x", {"a": ["y", "x"]}, True),
        ("a is false", {}, True),
        ("a is given", {"a": 0}, True),
        ("a is true or b > 1", {"b": 2.5}, True),
        ("a is true or b > 1", {"a": 0, "b": 1}, False),
    ],
)
def test_a_condition_of_a_known_fault_is_evaluated(text: str, values: dict[str, Any], holds: bool) -> None:
    assert any(term.holds(values) for term in terms_of(text)) is holds


def test_releases_are_compared_as_numbers() -> None:
    assert version_of("0.20.0+d98e8a64") == (0, 20, 0)
    assert version_of("0.9") < version_of("0.10.1") < version_of("0.10.2rc1")


def test_a_release_that_was_not_looked_at_has_risks_only() -> None:
    job = a_job({**TWO, "overlap_p2p_comm": False}, "0.31.0")
    unseen, finding = section(job).findings
    assert (unseen.name, unseen.level, finding.level) == ("release-not-examined", RISK, RISK)
    assert "0.31.0 was not examined" in finding.text
    assert section(a_job(job.given, "0.19.2")).findings[0].level == ERROR
    assert section(a_job(job.given, "")).findings[0].level == ERROR


@pytest.mark.parametrize(
    ("release", "examined"),
    [("0.11.0", False), ("0.14.0", True), ("0.19.2", True), ("0.20.0rc1", True), ("0.20.1", False), ("", True)],
)
def test_a_release_that_was_not_examined_is_said(release: str, examined: bool) -> None:
    """Otherwise "none of the known faults" would read as an answer."""
    findings = section(a_job({"num_layers": 4}, release)).findings
    assert [one.name for one in findings] == ([] if examined else ["release-not-examined"])
    assert all("from 0.14.0 to 0.20.0" in one.text for one in findings)


def test_jobs_without_megatron_meet_none() -> None:
    assert met_by(a_job({**TWO, "overlap_p2p_comm": False}, "", "torchtitan")) == []


def test_verl_keeps_outputs_and_sends_them_one_by_one() -> None:
    given = {**FOUR, "deallocate_pipeline_outputs": None}
    assert values_of(a_job(given, framework="verl"))["deallocate_pipeline_outputs"] is False
    assert "outputs-freed-before-they-are-sent" not in met_by(a_job(given, "0.17.0", "verl"))


def test_values_that_megatron_sets_by_itself_are_known() -> None:
    values = values_of(a_job({**TWO, "overlap_p2p_comm": True}))
    assert values["batch_p2p_comm"] is False
    assert values["deallocate_pipeline_outputs"] is True


@pytest.mark.parametrize(
    ("layout", "between"),
    [("Et*8|t*8|m|L", True), ("Et*8|t*4|t*4|mL", False), ("Etm|t*8|t*7|L", False), ("Et*8|t*8m|L", False), ("", False)],
    ids=["between", "last", "first", "three stages on four ranks", "none"],
)
def test_multi_token_prediction_between_the_ends(layout: str, between: bool) -> None:
    values = values_of(a_job({**BETWEEN, "pipeline_model_parallel_layout": layout}, framework="megatron-bridge"))
    assert values["prediction_between_the_ends"] is between


@pytest.mark.parametrize(
    ("coefficients", "there"),
    [({}, False), ({"moe_aux_loss_coeff": 0.01}, True), ({"moe_z_loss_coeff": 1e-3}, True)],
    ids=["none", "load balancing", "z-loss"],
)
def test_auxiliary_losses_of_experts(coefficients: dict[str, Any], there: bool) -> None:
    assert values_of(a_job(coefficients))["auxiliary_losses_of_experts"] is there


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({}, True),
        ({"moe_layer_freq": "([0]*7+[1]*9)"}, False),
        ({"moe_layer_freq": "([1]*8+[0]*8)"}, False),
        ({"moe_layer_freq": "([0]*3+[1]*9)"}, False),
        ({"num_experts": None}, False),
        ({"moe_layer_freq": 2}, False),
    ],
    ids=["first", "one on each", "last, with prediction", "another number of layers", "dense", "every second"],
)
def test_a_rank_without_experts(changes: dict[str, Any], there: bool) -> None:
    assert values_of(a_job({**DENSE, **changes}))["rank_without_experts"] is there


def test_local_layers_do_not_sum_the_rotary_key_under_sequence_parallelism_either() -> None:
    latent = {**LATENT, "sequence_parallel": True}
    assert met_by(a_job(latent)) == []
    assert met_by(a_job({**latent, "transformer_impl": "local"})) == ["shared-rotary-key-not-summed"]


def test_the_engine_is_a_way_out_where_it_has_no_such_fault() -> None:
    batched = section(a_job({**TWO, "overlap_p2p_comm": False})).findings[0]
    assert batched.change.endswith("or megatron-pp run: its steps do not have this fault")
    latent = section(a_job(LATENT)).findings[0]
    assert "megatron-pp run" not in latent.change
    assert {batched.level, latent.level} == {ERROR}
    assert NOTE in {finding.level for finding in section(a_job(FOUR)).findings}


def test_a_job_on_this_engine_meets_what_the_engine_has_too() -> None:
    early = {"overlap_p2p_comm": True, "virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
    there, here = (Job("megatron", 8, early, early, release="0.16.1", on_engine=one) for one in (False, True))
    faults = {fault.name: fault for fault in known_faults()[0]}
    met = [one.name for one in section(there).findings]
    assert any(faults[name].engine == NOT_AFFECTED for name in met)
    assert [one.name for one in section(here).findings] == [name for name in met if faults[name].engine == SAME]
