"""The sections "memory", "time" and "hangs": their numbers equal numbers calculated by hand, and their findings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp.integrations.megatron.steps.served import scope
from megatron_pp.tools.advise.layers.gpus import GPUS
from megatron_pp.tools.check import hangs, memory, step_time
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.sizes import vocabulary_of
from megatron_pp.tools.check.priced import layers_of, priced, transformer_of_job
from megatron_pp.tools.check.stages import stages_of

H100 = GPUS["h100"]
LLAMA_8B: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "seq_length": 8192,
    "swiglu": True,
    "padded_vocab_size": 128256,
    "bf16": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 4,
    "data_parallel_size": 2,
    "use_distributed_optimizer": True,
    "global_batch_size": 32,
    "micro_batch_size": 1,
}


def job(**args: Any) -> Job:
    return Job("megatron", 8, args, {**LLAMA_8B, **args})


def test_what_is_not_given_is_named_where_it_is_needed() -> None:
    for name, spelling in (("num_layers", "--num-layers"), ("global_batch_size", "--global-batch-size")):
        line = f"not estimated: {spelling} is not given"
        assert memory.section(job(**{name: None}), H100).lines[0] == line
        assert step_time.section(job(**{name: None}), H100).lines[0] == line


def test_gradients_have_the_type_of_megatrons_buffers() -> None:
    """Megatron's parser turns gradients in fp32 on with bf16, and not with fp16."""
    half = {"bf16": False, "fp16": True}
    for args, size in (
        ({}, 4),
        ({"grad_reduce_in_bf16": True}, 2),
        (half, 2),
        ({**half, "accumulate_allreduce_grads_in_fp32": True}, 4),
        ({"bf16": False}, 4),
    ):
        assert transformer_of_job(job(**args)).shape.gradient_bytes == size, args


def test_layers_are_on_the_stages_of_the_layout() -> None:
    one = job(mtp_num_layers=1, num_layers=6, pipeline_model_parallel_layout="Et|tt|ttt|mL")
    stages = layers_of(transformer_of_job(one).model(H100), stages_of(one))
    kinds = [[layer.kind for layer in stage] for stage in stages]
    assert kinds == [["embedding", "decoder"], ["decoder"] * 2, ["decoder"] * 3, ["mtp", "loss"]]


def test_parameters_are_those_of_the_model() -> None:
    """There are 8.03e9 parameters of 2 bytes, their fp32 gradients, and 12 bytes each, divided by two replicas."""
    ranks = memory.memory_of(job(), H100, priced(job(), H100))
    assert sum(one.parameters for one in ranks) == pytest.approx(16.06, rel=0.01)
    assert sum(one.gradients for one in ranks) == pytest.approx(32.1, rel=0.01)
    assert sum(one.optimizer for one in ranks) == pytest.approx(48.2, rel=0.01)
    found = memory.section(job(), H100)
    assert isinstance(found.data, dict)
    assert [one["total"] for one in found.data["ranks"]] == [pytest.approx(one.total) for one in ranks]


def test_gradients_in_bf16_take_two_bytes() -> None:
    """`--grad-reduce-in-bf16` makes Megatron's buffers of gradients bf16. Without bf16 it changes nothing."""
    whole, half = (job(grad_reduce_in_bf16=given) for given in (False, True))
    ranks, shorter = (memory.memory_of(one, H100, priced(one, H100)) for one in (whole, half))
    for one, less in zip(ranks, shorter, strict=True):
        assert less.gradients == pytest.approx(one.gradients / 2)
        assert less.total == pytest.approx(one.total - one.gradients / 2)
        assert less.parameters == pytest.approx(one.parameters)
    assert any("gradients in 16 bits: --grad-reduce-in-bf16" in line for line in memory.section(half, H100).lines)
    fp32 = {"bf16": False, "num_experts": 4, "expert_model_parallel_size": 2}
    assert memory.section(job(**fp32, grad_reduce_in_bf16=True), H100).data == memory.section(job(**fp32), H100).data


def test_experts_gradients_in_bf16_take_two_bytes() -> None:
    experts = {"num_experts": 4, "expert_model_parallel_size": 2}
    ranks, shorter = (
        memory.memory_of(one, H100, priced(one, H100))
        for one in (job(**experts), job(**experts, grad_reduce_in_bf16=True))
    )
    assert [less.gradients for less in shorter] == [pytest.approx(one.gradients / 2) for one in ranks]


def test_without_a_distributed_optimizer_every_replica_has_all_states() -> None:
    whole = memory.memory_of(
        job(use_distributed_optimizer=False), H100, priced(job(use_distributed_optimizer=False), H100)
    )
    shared = memory.memory_of(job(), H100, priced(job(), H100))
    assert [one.optimizer for one in whole] == [pytest.approx(2 * one.optimizer) for one in shared]


def test_earlier_ranks_keep_more_microbatches() -> None:
    kept = [one.activations for one in memory.memory_of(job(), H100, priced(job(), H100))]
    assert kept[0] > kept[1] > kept[2] > 0
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    less = [one.activations for one in memory.memory_of(job(), H100, priced(job(**recomputed), H100))]
    assert less[0] < kept[0] / 10


def test_recomputed_layers_may_be_a_number() -> None:
    by_number = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4}
    half = priced(job(**by_number), H100)
    assert half.cut.recomputed == (4, 4, 4, 4)
    assert half.cut.peaks[0] < priced(job(), H100).cut.peaks[0]


def test_memory_outside_torch_is_given_as_a_range() -> None:
    found = memory.section(job(), H100)
    (line,) = (one for one in found.lines if "NCCL and CUDA take" in one)
    assert line.endswith("take an estimated 0.96 GB over NVLink; over sockets, up to 1.5 GB were measured")


def test_a_job_that_does_not_fit_is_told_what_to_change_first() -> None:
    large = job(num_layers=64, seq_length=16384, pipeline_model_parallel_size=4)
    (found,) = memory.section(large, H100).findings
    assert (found.name, found.level) == ("does-not-fit", "risk")
    assert found.change.startswith("--recompute-granularity full")
    assert memory.section(job(), GPUS["b300"]).findings == ()


def test_without_a_card_memory_and_time_are_not_looked_at() -> None:
    for section in (memory.section(job(), None), step_time.section(job(), None)):
        assert section.findings == ()
        assert "--gpu" in section.lines[0]


def test_sizes_that_are_missing_are_named() -> None:
    known = replace(job(), args={**LLAMA_8B, "hidden_size": None})
    assert "--hidden-size" in memory.section(known, H100).lines[0]


def test_a_long_step_is_estimated_from_shorter_steps() -> None:
    whole = step_time.timed(job(global_batch_size=32), H100)  # not extrapolated: the longer pilot has 16 microbatches
    longer = step_time.timed(job(global_batch_size=128), H100)
    exact = step_time._simulated(priced(job(global_batch_size=128), H100), H100)
    assert longer.step == pytest.approx(exact.step, rel=0.01)
    assert longer.bubble == pytest.approx(exact.bubble, abs=0.005)
    assert longer.step > 3 * whole.step


def test_the_bubble_is_that_of_the_schedule() -> None:
    """With equal stages it is (P - 1) / (M + P - 1); embedding and loss make the stages unequal."""
    even = job(padded_vocab_size=0, global_batch_size=32)
    assert step_time.timed(even, GPUS["h100"]._replace(network=1e15)).bubble == pytest.approx(3 / 19, abs=0.01)


def test_a_faster_setting_is_named_with_its_flag() -> None:
    found = step_time.section(job(global_batch_size=16), GPUS["b300"])
    changes = [one.change for one in found.findings]
    assert 0 < len(changes) <= 3
    assert any("--num-virtual-stages-per-pipeline-rank" in one or "zb_h1" in one for one in changes)
    steps = [one["step_ms"] for one in found.data["better"]]  # type: ignore[index]
    assert steps == sorted(steps)
    assert steps[-1] < found.data["step_ms"]  # type: ignore[index]


def test_an_unequal_rank_is_named_with_its_dearest_layer() -> None:
    heavy = job(num_layers=8, padded_vocab_size=1024 * 1024)
    assert any(
        line.startswith("rank 3 computes") and "the loss" in line for line in step_time.section(heavy, H100).lines
    )


def test_a_plan_is_verified_under_the_rules_of_the_device() -> None:
    found = hangs.section(job())
    assert found.findings == ()
    assert found.lines[0].startswith("under install() the plan 1f1b P=4 V=1 M=16")
    assert found.data["verified"] is True  # type: ignore[index]
    assert hangs.section(job(pipeline_model_parallel_size=1)).data == {"verified": None}
    assert "see Start" in hangs.section(job(global_batch_size=31)).lines[0]


SERVED = "install() runs every step: none of the settings needs Megatron's own schedule."


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"overlap_moe_expert_parallel_comm": True}, None),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}, None),
        ({"cuda_graph_impl": "full_iteration"}, "CUDA graphs of a whole iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "CUDA graphs of a whole iteration"),
        ({"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}, "CUDA graphs of a whole iteration"),
        ({"use_ring_exchange_p2p": True}, "the exchange of a custom-built torch"),
        ({"hybrid_context_parallel": True, "pipeline_model_parallel_size": 1}, "hybrid context parallelism"),
        ({"use_megatron_fsdp": True, "overlap_moe_expert_parallel_comm": True}, "the combined 1F1B with Megatron-FSDP"),
        ({"use_megatron_fsdp": True}, None),
    ],
)
def test_settings_that_leave_steps_to_megatrons_own_schedule_are_named(
    settings: dict[str, Any], reason: str | None
) -> None:
    """The answer uses the function by which `install()` decides in each step, on the job's settings."""
    found = hangs.section(job(**settings))
    model = SimpleNamespace(
        config=SimpleNamespace(**{"pipeline_model_parallel_size": 4, **settings}),
        ddp_config=SimpleNamespace(use_megatron_fsdp=settings.get("use_megatron_fsdp", False)),
    )
    decided = scope._unserved_config("forward_backward_pipelining_without_interleaving", {"model": model})
    if reason is None:
        assert found.lines[-1] == SERVED
        assert decided is None
    else:
        assert str(decided).startswith(reason)
        assert found.lines[0] == (
            f"install() leaves the training steps to Megatron's own schedule: the engine does not serve {decided}."
        )
        assert found.data == {"verified": None, "handed_back": decided}


def test_settings_that_no_schedule_runs_are_not_blamed_on_install() -> None:
    found = hangs.section(job(hybrid_context_parallel=True))
    assert SERVED not in found.lines
    assert not any("leaves the training steps" in line for line in found.lines)
    other = hangs.section(replace(job(), framework="torchtitan"))
    assert SERVED not in other.lines


def test_a_plan_that_cannot_be_made_is_an_error() -> None:
    chunked = {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": -3}
    (found,) = hangs.section(job(**chunked)).findings
    assert (found.name, found.level) == ("plan-refused", "error")
    assert found.text == "there is no plan for the job: group size is -3; it must be a whole number of at least 0"


def test_a_pipeline_larger_than_any_model_is_not_looked_at() -> None:
    huge = job(pipeline_model_parallel_size=10**6)
    assert "check takes at most 2048" in memory.section(huge, H100).lines[0]
    assert [one.name for one in hangs.section(huge).findings] == ["plan-refused"]


def test_a_step_of_very_many_microbatches_repeats_the_plan_that_is_verified() -> None:
    lines = hangs.section(job(global_batch_size=2 * 10**9)).lines
    assert "M=32 " in lines[0]
    assert "The job's step of 1000000000 microbatches repeats this plan." in lines


def test_a_job_without_a_batch_size_is_reported() -> None:
    silent = replace(job(), args={**LLAMA_8B, "global_batch_size": None})
    assert hangs.section(silent).lines[0] == "no plan: --global-batch-size is not given"
    for section in (memory.section(silent, H100), step_time.section(silent, H100)):
        assert section.lines == ("not estimated: --global-batch-size is not given",)


def test_an_unknown_vocabulary_size_is_reported() -> None:
    """Otherwise the embedding and the output layer would be missing silently."""
    words = {"vocab_size": None, "padded_vocab_size": None}
    for found in (memory.section(job(**words), H100), step_time.section(job(**words), H100)):
        assert any("--vocab-size is not known" in line for line in found.lines)
    for known in ({}, {**words, "merge_file": "merges.txt"}, {**words, "tokenizer_type": "Llama2Tokenizer"}):
        assert not any("not known" in line for line in memory.section(job(**known), H100).lines)


def test_a_tokenizer_says_how_many_words_there_are() -> None:
    sizes = {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2}
    assert vocabulary_of({**sizes, "merge_file": "merges.txt"}) == 50432  # 50257, padded to 256
    assert vocabulary_of({**sizes, "tokenizer_type": "Llama2Tokenizer"}) == 32000
    assert vocabulary_of({**sizes, "tokenizer_type": "HuggingFaceTokenizer"}) == 0
    assert vocabulary_of({**sizes, "vocab_size": 1000}) == 1024


def test_only_settings_that_were_tried_are_named() -> None:
    one = job(pipeline_model_parallel_size=1, data_parallel_size=8)
    alone = step_time.section(one, H100)
    assert (alone.data["tried"], alone.data["not_tried"]) == ([], [])  # type: ignore[index]
    assert not any("faster" in line for line in alone.lines)
    placed = step_time.section(job(pipeline_model_parallel_layout="Et*8|t*8|t*8|t*8L"), H100)
    assert not any("chunk" in name for name in placed.data["tried"])  # type: ignore[index]


def test_settings_that_take_long_to_look_at_are_named_as_such() -> None:
    long = job(num_layers=128, pipeline_model_parallel_size=64, data_parallel_size=1, global_batch_size=512)
    found = step_time.section(replace(long, gpus=64), H100)
    assert "overlapped transfers" in found.data["not_tried"]  # type: ignore[index]
    assert any(line.startswith("not simulated, because it takes long: ") for line in found.lines)


def test_no_setting_is_recommended_that_megatron_refuses() -> None:
    """Megatron's interleaved schedule refuses a last group smaller than P: 18 microbatches are 4 groups of 4, and 2."""
    found = step_time.section(job(global_batch_size=36), H100)
    assert not any("chunks" in name for name in found.data["tried"])  # type: ignore[index]
    assert any("chunks" in name for name in step_time.section(job(), H100).data["tried"])  # type: ignore[index]


def test_the_answer_asks_for_the_number_of_chunks_not_layers_per_chunk() -> None:
    flag = {"num_layers_per_virtual_pipeline_stage": 4, "virtual_pipeline_model_parallel_size": 2}
    found = step_time.section(job(**flag, overlap_p2p_comm=True), GPUS["b300"])
    changes = [one.change for one in found.findings if one.change.startswith("--num-virtual")]
    assert changes
    assert all(one.endswith("instead of --num-layers-per-virtual-pipeline-stage") for one in changes)


def test_the_layer_that_makes_a_rank_slow_is_the_one_that_others_lack() -> None:
    """The most expensive layer is not named if all ranks have it."""
    long = job(num_layers=128, hidden_size=8192, pipeline_model_parallel_size=64, tensor_model_parallel_size=8,
               data_parallel_size=1, num_attention_heads=64, global_batch_size=256)  # fmt: skip
    lines = step_time.section(replace(long, gpus=512), H100).lines
    assert any(line.startswith("rank 63 computes") and "by the loss" in line for line in lines)


def test_a_long_pipeline_is_estimated_from_shorter_steps() -> None:
    long = job(num_layers=32, pipeline_model_parallel_size=32, data_parallel_size=1, global_batch_size=128)
    exact = step_time._simulated(priced(long, H100), H100)
    assert step_time.timed(long, H100).step == pytest.approx(exact.step, rel=0.01)


@pytest.mark.parametrize(
    "feature",
    [{"cuda_graph_impl": "transformer_engine"}, {"delay_wgrad_compute": True}, {"enable_cuda_graph": True}],
)
def test_no_schedule_is_recommended_that_this_engine_refuses(feature: dict[str, Any]) -> None:
    """CUDA graphs and features that pair forwards with backwards need Megatron's order; `install()` then refuses zero
    bubble."""
    assert "zero bubble, zb_h1" in step_time.section(job(), H100).data["tried"]  # type: ignore[index]
    assert "zero bubble, zb_h1" not in step_time.section(job(**feature), H100).data["tried"]  # type: ignore[index]


def test_context_parallel_ranks_share_the_optimizers_states() -> None:
    """Megatron's distributed optimizer splits over the group of data and context parallelism."""
    wide = job(context_parallel_size=2, data_parallel_size=1)
    for other in (job(), wide):
        ranks = memory.memory_of(other, H100, priced(other, H100))
        assert sum(one.optimizer for one in ranks) == pytest.approx(48.2, rel=0.01)  # 12 bytes / 2
    both = job(context_parallel_size=2)
    assert sum(one.optimizer for one in memory.memory_of(both, H100, priced(both, H100))) == pytest.approx(
        24.1, rel=0.01
    )


def test_answers_for_other_programs_name_no_megatron_flags() -> None:
    titan = replace(job(num_layers=64, seq_length=16384, use_distributed_optimizer=False), framework="torchtitan")
    (found,) = memory.section(titan, H100).findings
    assert (found.name, found.change) == ("does-not-fit", "")
    shown = step_time.section(titan, H100)
    assert (shown.findings, shown.data["tried"]) == ((), [])  # type: ignore[index]


@pytest.mark.parametrize(("framework", "args"), [("torchtitan", {}), ("megatron", {"use_megatron_fsdp": True})])
def test_the_answer_says_that_sharded_parameters_are_not_counted(framework: str, args: dict[str, Any]) -> None:
    lines = memory.section(replace(job(**args), framework=framework), H100).lines
    assert any(line.startswith("too high: the estimate ignores that FSDP") for line in lines)
    assert not any("FSDP" in line for line in memory.section(job(), H100).lines)
