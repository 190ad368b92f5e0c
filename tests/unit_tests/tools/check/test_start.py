"""The section "start": each rule on a job that breaks it and on a job that keeps it, all rules at once, and Megatron's
refusals with the right value that a rule knows."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_pp.tools.check.findings import ERROR, NOTE, RISK, Finding
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.rules import RULES
from megatron_pp.tools.check.start import section

RIGHT: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 64,
    "bf16": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "data_parallel_size": 2,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "overlap_p2p_comm": True,
}
CHUNKED = {"virtual_pipeline_model_parallel_size": 2}
MOE = {"num_experts": 8, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
COMBINED = {
    **MOE,
    **CHUNKED,
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
}


def job(
    gpus: int = 16,
    found: tuple[Finding, ...] = (),
    framework: str = "megatron",
    given: dict[str, Any] | None = None,
    **args: Any,
) -> Job:
    given = args if given is None else given
    return Job(framework, gpus, given, {**RIGHT, **args}, found=found, validated=bool(found))


ANY_COUNT = "install(any_microbatch_count=True), or megatron-pp run --any-microbatch-count"
BROKEN: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # rule, a job that breaks it, a job that keeps it, the suggested change
    ("sizes-below-one", {"context_parallel_size": 0}, {"context_parallel_size": 1}, ""),
    ("sizes-below-one", {"micro_batch_size": -1}, {}, ""),
    ("gpus-of-the-layout", {"gpus": 12}, {"gpus": 24}, "8 or 16 GPUs"),
    (
        "layers-on-stages",
        {
            "pipeline_model_parallel_size": 2,
            "num_layers": 48,
            "decoder_first_pipeline_num_layers": 11,
            "decoder_last_pipeline_num_layers": 13,
        },
        {
            "pipeline_model_parallel_size": 2,
            "num_layers": 24,
            "decoder_first_pipeline_num_layers": 11,
            "decoder_last_pipeline_num_layers": 13,
        },
        "--decoder-last-pipeline-num-layers 37",
    ),
    (
        "layers-on-stages",
        {"pipeline_model_parallel_size": 1, "num_layers": 8, "decoder_last_pipeline_num_layers": 3},
        {"pipeline_model_parallel_size": 1, "num_layers": 8, "decoder_last_pipeline_num_layers": 8},
        "leave --decoder-last-pipeline-num-layers out",
    ),
    ("layers-on-stages", {"num_layers": 9}, {"num_layers": 12}, "--num-layers 8 or 12"),
    ("layers-on-stages", {"num_layers": 10, "account_for_loss_in_pipeline_split": True}, {"num_layers": 4}, ""),
    (
        "layers-on-stages",
        {"num_layers": 10},
        {"num_layers": 10, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ),
    (
        "layers-on-stages",
        {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL", "num_layers": 9},
        {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"},
        "--num-layers 8",
    ),
    (
        "layers-on-stages",
        {"pipeline_model_parallel_layout": "Ett|tt|tt|ttmL"},
        {"pipeline_model_parallel_layout": "Ett|tt|tt|ttmL", "mtp_num_layers": 1},
        "--mtp-num-layers 1",
    ),
    ("layers-on-stages", {"pipeline_model_parallel_layout": "tt|Ett|tt|ttL"}, {}, ""),
    ("layers-on-stages", {"pipeline_model_parallel_layout": "Ett|tt|ttL|tt"}, {}, ""),
    ("layers-on-stages", {"pipeline_model_parallel_layout": "Ett|tt|ttttL"}, {}, ""),
    (
        "layers-on-stages",
        {**CHUNKED, "decoder_first_pipeline_num_layers": 3, "num_layers": 15},
        {**CHUNKED, "decoder_first_pipeline_num_layers": 2, "num_layers": 14},
        "",
    ),
    ("global-batch", {"global_batch_size": 17}, {"global_batch_size": 18}, "--global-batch-size 16 or 18"),
    (
        "microbatches-of-the-last-group",
        {**CHUNKED, "global_batch_size": 20},
        {**CHUNKED, "global_batch_size": 24},
        f"--global-batch-size 16 or 24, or {ANY_COUNT}",
    ),
    (
        "microbatches-of-the-last-group",
        {**CHUNKED, "global_batch_size": 4},
        {"global_batch_size": 4},
        f"--global-batch-size 8, or {ANY_COUNT}",
    ),
    (
        "microbatches-of-the-last-group",
        {**CHUNKED, "microbatch_group_size_per_vp_stage": 2},
        {**CHUNKED, "microbatch_group_size_per_vp_stage": 8},
        "--microbatch-group-size-per-vp-stage 4",
    ),
    (
        "interleaved-on-two-ranks",
        {**CHUNKED, "pipeline_model_parallel_size": 2, "overlap_p2p_comm": False},
        {**CHUNKED, "pipeline_model_parallel_size": 4, "overlap_p2p_comm": False},
        "leave --no-overlap-p2p-communication out",
    ),
    ("attention-heads", {"num_attention_heads": 9, "hidden_size": 72}, {}, "--tensor-model-parallel-size 1 or 3"),
    (
        "query-groups",
        {"group_query_attention": True, "num_query_groups": 3},
        {"group_query_attention": True, "num_query_groups": 4},
        "--tensor-model-parallel-size 1 or 3",
    ),
    (
        "sequence-length",
        {"seq_length": 66, "sequence_parallel": True, "context_parallel_size": 2, "gpus": 32},
        {"seq_length": 68, "sequence_parallel": True, "context_parallel_size": 2, "gpus": 32},
        "--seq-length 64 or 68",
    ),
    ("sequence-length", {"seq_length": 65, "sequence_parallel": True}, {"seq_length": 65}, "--seq-length 64 or 66"),
    (
        "experts-on-ranks",
        {**MOE, "gpus": 48, "expert_model_parallel_size": 3},
        {**MOE},
        "--expert-model-parallel-size 2 or 4",
    ),
    (
        "experts-on-ranks",
        {"expert_model_parallel_size": 2},
        {"expert_model_parallel_size": 2, "num_layers": None},  # the model is not known
        "leave --expert-model-parallel-size out",
    ),
    (
        "gpus-of-the-experts",
        {**MOE, "expert_model_parallel_size": 8},
        {**MOE, "expert_model_parallel_size": 4},
        "--expert-model-parallel-size 4",
    ),
    ("experts-without-sequence-parallelism", {**MOE, "sequence_parallel": False}, MOE, "--sequence-parallel"),
    ("experts-of-a-token", {**MOE, "moe_router_topk": 9}, {**MOE, "moe_router_topk": 8}, "--moe-router-topk 8"),
    (
        "recomputation",
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    (
        "recomputation",
        {"recompute_granularity": "full", "recompute_method": "uniform"},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        "--recompute-num-layers 1",
    ),
    (
        "recomputation",
        {"recompute_granularity": "selective", "recompute_method": "block"},
        {"recompute_granularity": "selective"},
        "leave --recompute-method out",
    ),
    ("offloading-in-a-pipeline", {"cpu_offloading": True}, {}, "leave --cpu-offloading out"),
    (
        "combined-1f1b",
        {
            **MOE,
            "overlap_moe_expert_parallel_comm": True,
            "expert_model_parallel_size": 2,
            "moe_token_dispatcher_type": "alltoall",
        },
        {
            **MOE,
            **CHUNKED,
            "overlap_moe_expert_parallel_comm": True,
            "expert_model_parallel_size": 2,
            "moe_token_dispatcher_type": "alltoall",
        },
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    ("two-precisions", {"fp16": True}, {}, "leave --fp16 out"),
    ("two-precisions", {"fp8": "hybrid", "fp4": "e2m1"}, {"fp8": "hybrid"}, "leave --fp8 out, or leave --fp4 out"),
    (
        "offloading-in-a-pipeline",
        {"cpu_offloading": True, "pipeline_model_parallel_size": 1, "recompute_granularity": "selective"},
        {"cpu_offloading": True, "pipeline_model_parallel_size": 1},
        "leave --recompute-granularity out",
    ),
    (
        "pipeline-of-a-feature",
        {"use_torch_fsdp2": True},
        {"use_torch_fsdp2": True, "pipeline_model_parallel_size": 1},
        "leave --use-torch-fsdp2 out",
    ),
    (
        "pipeline-of-a-feature",
        {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 1},
        {"defer_embedding_wgrad_compute": True},
        "leave --defer-embedding-wgrad-compute out",
    ),
    (
        "combined-1f1b",
        {"delay_wgrad_compute": True},
        {},
        "--overlap-moe-expert-parallel-comm, or leave --delay-wgrad-compute out",
    ),
    ("combined-1f1b", {**COMBINED, "mtp_num_layers": 2}, {**COMBINED, "mtp_num_layers": 1}, "--mtp-num-layers 1"),
    (
        "combined-1f1b",
        {**COMBINED, "moe_shared_expert_overlap": True},
        COMBINED,
        "leave --moe-shared-expert-overlap out",
    ),
    (
        "lengths-of-tokens",
        {**MOE, "variable_seq_lengths": True},
        {**MOE, "variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},
        "--moe-token-dispatcher-type alltoall",
    ),
    (
        "overlapped-gather",
        {"overlap_param_gather": True, "use_distributed_optimizer": True},
        {"overlap_param_gather": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
        "--overlap-grad-reduce",
    ),
    (
        "optimizer-instances",
        {"num_distributed_optimizer_instances": 4},
        {"num_distributed_optimizer_instances": 2},
        "leave --num-distributed-optimizer-instances out",
    ),
    (
        "sequence-parallel-alone",
        {"framework": "megatron-bridge", "sequence_parallel": True, "tensor_model_parallel_size": 1},
        {"framework": "megatron", "sequence_parallel": True, "tensor_model_parallel_size": 1},
        "leave --sequence-parallel out",
    ),
    ("width-of-heads", {"hidden_size": 66}, {"framework": "verl", "hidden_size": 66}, "--num-attention-heads 6 or 11"),
    (
        "vocabulary",
        {"padded_vocab_size": 101},
        {"padded_vocab_size": 102},
        "--padded-vocab-size 102",
    ),
    ("positions", {"max_position_embeddings": 32}, {"max_position_embeddings": 64}, "--max-position-embeddings 64"),
    (
        "heads-of-context-parallelism",
        {"gpus": 64, "cp_comm_type": ["a2a"], "context_parallel_size": 8},
        {"gpus": 64, "cp_comm_type": ["a2a"], "context_parallel_size": 4},
        "--cp-comm-type p2p",
    ),
    (
        "levels-of-context-parallelism",
        {"gpus": 32, "context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 4]},
        {"gpus": 32, "context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
        "--context-parallel-size 8",
    ),
    (
        "levels-of-context-parallelism",
        {"gpus": 32, "context_parallel_size": 4, "cp_comm_type": ["a2a+p2p"]},
        {},
        "--hierarchical-context-parallel-sizes A B with A x B = 4",
    ),
    (
        "transfers",
        {**CHUNKED, "batch_p2p_comm": True},
        {**CHUNKED, "batch_p2p_comm": False},
        "--batch-p2p-comm false",
    ),
    (
        "transfers",
        {"overlap_p2p_comm_warmup_flush": True, "overlap_p2p_comm": False, "batch_p2p_comm": True},
        {**CHUNKED, "overlap_p2p_comm_warmup_flush": True, "batch_p2p_comm": False},
        "--num-virtual-stages-per-pipeline-rank 2, or leave --overlap-p2p-comm-warmup-flush out",
    ),
    (
        "global-batch",
        {"global_batch_size": 1, "decrease_batch_size_if_needed": True},
        {"global_batch_size": 17, "decrease_batch_size_if_needed": True},
        "--global-batch-size 2",
    ),
    (
        "batch-size-rampup",
        {"rampup_batch_size": [4, 5, 100]},
        {"rampup_batch_size": [4, 4, 100]},
        "--rampup-batch-size 4 12 100",
    ),
    (
        "batch-size-rampup",
        {"rampup_batch_size": [4, 3, 100]},
        {"rampup_batch_size": [4, 2, 100]},
        "2 or 4 instead of 3",
    ),
    (
        "global-batch",
        {"global_batch_size": 1, "step_batch_size_schedule": "0:15 2B:32"},
        {"global_batch_size": 1, "step_batch_size_schedule": "0:16 2B:32"},
        "--step-batch-size-schedule that begins with 14 or 16",
    ),
    ("batch-size-rampup", {"rampup_batch_size": [4, 4]}, {}, ""),
    ("batch-size-rampup", {"rampup_batch_size": ["a", "b", "c"]}, {}, ""),
    (
        "chunks-without-a-pipeline",
        {**CHUNKED, "pipeline_model_parallel_size": 1, "num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_model_parallel_size": 1},
        "leave --num-virtual-stages-per-pipeline-rank out",
    ),
    (
        "layers-placed-in-two-ways",
        {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL", "account_for_loss_in_pipeline_split": True},
        {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"},
        "leave --account-for-loss-in-pipeline-split out",
    ),
    (
        "layers-placed-in-two-ways",
        {"given": {"pipeline_model_parallel_layout": 1, "num_virtual_stages_per_pipeline_rank": 2}},
        {"given": {"pipeline_model_parallel_layout": 1}},
        "leave --num-virtual-stages-per-pipeline-rank out",
    ),
    ("layers-on-stages", {"pipeline_model_parallel_layout": "Ett|tt|ttm|ttL", "mtp_num_layers": 1}, {}, ""),
    ("layers-on-stages", {"pipeline_model_parallel_layout": "Ett|tt|ttttm|mL", "mtp_num_layers": 2}, {}, ""),
    (
        "layers-on-stages",
        {**CHUNKED, "pipeline_model_parallel_layout": "Ettt|ttttt|m|||||L", "mtp_num_layers": 1},
        {**CHUNKED, "pipeline_model_parallel_layout": "Ettt|ttttt|||||m|L", "mtp_num_layers": 1},
        "m on one of the last 4 stages",
    ),
]


@pytest.mark.parametrize(("name", "broken", "right", "change"), BROKEN)
def test_a_rule_finds_what_breaks_it_and_nothing_else(
    name: str, broken: dict[str, Any], right: dict[str, Any], change: str
) -> None:
    found = section(job(**broken)).findings
    assert [(one.name, one.level, one.change) for one in found] == [(name, ERROR, change)]
    assert found[0].text
    assert section(job(**right)).findings == ()


def test_every_rule_is_broken_by_a_case() -> None:
    of_engine = {"microbatches-of-this-engine"}  # below
    assert {name for name, *_ in BROKEN} == {rule.name for rule in RULES} - of_engine


def test_all_findings_are_reported_together() -> None:
    found = section(job(gpus=12, num_layers=9, global_batch_size=17, num_attention_heads=9)).findings
    assert [one.name for one in found] == [
        "gpus-of-the-layout", "layers-on-stages", "global-batch", "attention-heads", "width-of-heads",
    ]  # fmt: skip


def test_megatrons_refusal_gets_the_value_that_a_rule_knows() -> None:
    settings = ("num_attention_heads", "tensor_model_parallel_size")
    refused = Finding("megatron-refuses-num-attention-heads", ERROR, "Megatron refuses: no", "", settings)
    other = Finding("megatron-refuses-lr", ERROR, "Megatron refuses: lr", "", ("lr",))
    note = Finding("megatron-says", NOTE, "Megatron says: hello")
    (first, second) = section(job(found=(refused, other, note), num_attention_heads=9)).findings
    assert (first.name, first.text) == (refused.name, refused.text)
    assert first.change == "--tensor-model-parallel-size 1 or 3"
    assert second == other


def test_findings_use_the_names_of_the_jobs_file() -> None:
    spelled = Job("verl", 16, {}, {**RIGHT, "num_layers": 9}, {"num_layers": "model.num_hidden_layers"})
    (found,) = section(spelled).findings
    assert found.change == "model.num_hidden_layers 8 or 12"


def test_a_job_on_this_engine_meets_its_refusals_and_not_those_of_megatrons_schedules() -> None:
    """`install()` also refuses the number of microbatches, unless any_microbatch_count is set."""
    odd = {"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 20}
    assert [one.name for one in section(job(**odd)).findings] == ["microbatches-of-the-last-group"]
    (found,) = section(Job("megatron", 16, odd, {**RIGHT, **odd}, on_engine=True)).findings
    assert (found.name, found.level) == ("microbatches-of-this-engine", RISK)
    assert "the last group has 2 of 4 microbatches" in found.text
    assert found.change.startswith("install(any_microbatch_count=True), or megatron-pp run --any-microbatch-count")
    even = {**odd, "global_batch_size": 24}
    assert section(Job("megatron", 16, even, {**RIGHT, **even}, on_engine=True)).findings == ()
    two = {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "overlap_p2p_comm": False}
    assert section(Job("megatron", 16, two, {**RIGHT, **two}, on_engine=True)).findings == ()
