"""What would end a job at its start: each rule on a job that breaks it and on one beside it, all rules at once, and
Megatron's refusals with the value that a rule knows."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_pp.tools.check.findings import ERROR, NOTE, Finding
from megatron_pp.tools.check.job import Job
from megatron_pp.tools.check.start import RULES, section

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


def job(gpus: int = 16, found: tuple[Finding, ...] = (), **args: Any) -> Job:
    return Job("megatron", gpus, args, {**RIGHT, **args}, found=found, validated=bool(found))


BROKEN: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # rule, a job that breaks it, one that does not, what would be right
    ("gpus-of-the-layout", {"gpus": 12}, {"gpus": 24}, "8 or 16 GPUs"),
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
        "--global-batch-size 16 or 24, or install(), whose schedules take any number of microbatches",
    ),
    (
        "microbatches-of-the-last-group",
        {**CHUNKED, "global_batch_size": 4},
        {"global_batch_size": 4},
        "--global-batch-size 8, or install(), whose schedules take any number of microbatches",
    ),
    (
        "microbatches-of-the-last-group",
        {**CHUNKED, "microbatch_group_size_per_vp_stage": 2},
        {**CHUNKED, "microbatch_group_size_per_vp_stage": 8},
        "--microbatch-group-size-per-vp-stage 4, or install(), whose schedules take any number of microbatches",
    ),
    (
        "interleaved-on-two-ranks",
        {**CHUNKED, "pipeline_model_parallel_size": 2, "overlap_p2p_comm": False},
        {**CHUNKED, "pipeline_model_parallel_size": 4, "overlap_p2p_comm": False},
        "leave --no-overlap-p2p-communication out, or install(), which runs it in any way",
    ),
    ("attention-heads", {"num_attention_heads": 9}, {}, "--tensor-model-parallel-size 1 or 3"),
    (
        "query-groups",
        {"group_query_attention": True, "num_query_groups": 3},
        {"group_query_attention": True, "num_query_groups": 4},
        "--tensor-model-parallel-size 1 or 3",
    ),
    (
        "sequence-length",
        {"seq_length": 66, "sequence_parallel": True, "context_parallel_size": 2, "gpus": 32},
        {"seq_length": 72, "sequence_parallel": True, "context_parallel_size": 2, "gpus": 32},
        "--seq-length 64 or 72",
    ),
    (
        "experts-on-ranks",
        {**MOE, "gpus": 48, "expert_model_parallel_size": 3},
        {**MOE},
        "--expert-model-parallel-size 2 or 4",
    ),
    ("experts-on-ranks", {"expert_model_parallel_size": 2}, {}, "leave --expert-model-parallel-size out"),
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
        {"recompute_granularity": "full", "recompute_method": "uniform"},
        "--recompute-method uniform --recompute-num-layers 1",
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
    assert {name for name, *_ in BROKEN} == {rule.name for rule in RULES}


def test_all_is_found_at_once() -> None:
    found = section(job(gpus=12, num_layers=9, global_batch_size=17, num_attention_heads=9)).findings
    assert [one.name for one in found] == [
        "gpus-of-the-layout", "layers-on-stages", "global-batch", "attention-heads",
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


def test_a_job_is_told_in_its_own_words() -> None:
    spelled = Job("verl", 16, {}, {**RIGHT, "num_layers": 9}, {"num_layers": "model.num_hidden_layers"})
    (found,) = section(spelled).findings
    assert found.change == "model.num_hidden_layers 8 or 12"
