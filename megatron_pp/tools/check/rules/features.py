"""Rules of Megatron's features: which of them need or exclude each other, or a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.rules.rule import Rule, either, set_to, unchecked, whole, without
from megatron_pp.tools.check.stages import chunks_of, pipeline_size

_COMBINED = "overlap_moe_expert_parallel_comm"
_NEEDS_COMBINED = ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release")
_WITHOUT_PIPELINE = {
    "use_torch_fsdp2": "torch's FSDP2",
    "hybrid_context_parallel": "hybrid context parallelism",
}


def _recomputation(job: Job) -> Iterator[tuple[str, str]]:
    how = job.get("recompute_granularity")
    method = job.get("recompute_method")
    named = job.spell("recompute_method")
    number = job.spell("recompute_num_layers")
    if how == "full" and method is None:
        yield f"{job.spell('recompute_granularity')} full needs {named}", f"{named} uniform {number} 1"
    elif how == "full" and job.get("recompute_num_layers") is None:
        yield f"{job.spell('recompute_granularity')} full needs {number}", f"{number} 1"
    if how == "selective":
        of_full = [name for name in ("recompute_method", "recompute_num_layers") if job.get(name) is not None]
        for name in of_full:
            yield f"{job.spell(name)} needs {job.spell('recompute_granularity')} full", without(job, name)


def _without_pipeline(job: Job) -> Iterator[tuple[str, str]]:
    """The features that Megatron refuses in a pipeline, and those that it refuses without a pipeline."""
    for name, words in _WITHOUT_PIPELINE.items():
        if job.get(name) and pipeline_size(job) > 1:
            yield f"Megatron refuses {words} ({job.spell(name)}) in a pipeline", without(job, name)
    deferred = "defer_embedding_wgrad_compute"
    if job.get(deferred) and pipeline_size(job) == 1:
        yield f"{job.spell(deferred)} needs a pipeline", without(job, deferred)
    if job.get(deferred) and not job.get("gradient_accumulation_fusion", True):
        fusion = job.spell("gradient_accumulation_fusion")
        yield f"{job.spell(deferred)} needs {fusion}", without(job, deferred)


def _offloading(job: Job) -> Iterator[tuple[str, str]]:
    named = job.spell("cpu_offloading")
    recomputed = "recompute_granularity"
    if job.get("cpu_offloading") and pipeline_size(job) > 1:
        yield f"Megatron refuses {named} in a pipeline", without(job, "cpu_offloading")
    if job.get("cpu_offloading") and job.get(recomputed):
        yield f"Megatron refuses {named} together with recomputation", without(job, recomputed)


def _combined(job: Job) -> Iterator[tuple[str, str]]:
    """Megatron's conditions for `overlap_moe_expert_parallel_comm` (`TransformerConfig`)."""
    named = job.spell(_COMBINED)
    if not job.get(_COMBINED):
        for name in _NEEDS_COMBINED:
            if job.get(name):
                yield f"{job.spell(name)} needs {named}", either(named, without(job, name))
        return
    if whole(job, "expert_model_parallel_size") == 1:
        yield f"{named} needs expert parallelism", set_to(job, "expert_model_parallel_size", [2])
    if job.get("moe_token_dispatcher_type", "allgather") not in ("alltoall", "flex"):
        yield f"{named} needs another dispatcher", f"{job.spell('moe_token_dispatcher_type')} alltoall"
    if job.get("recompute_granularity") == "full":
        yield f"{named} refuses full recomputation", f"{job.spell('recompute_granularity')} selective"
    if "moe" in (job.get("recompute_modules") or ()):
        modules = job.spell("recompute_modules")
        yield f"{named} refuses the recomputation of moe ({modules})", f"leave moe out of {modules}"
    if job.get("moe_shared_expert_overlap"):
        shared = "moe_shared_expert_overlap"
        yield f"{named} refuses {job.spell(shared)}", without(job, shared)
    if not (job.get("bf16") or job.get("fp16") or job.get("params_dtype") in ("bfloat16", "float16")):
        yield f"{named} needs 16-bit parameters", job.spell("bf16")
    yield from _combined_in_pipeline(job, named)


def _combined_in_pipeline(job: Job, named: str) -> Iterator[tuple[str, str]]:
    if pipeline_size(job) > 1 and chunks_of(job) == 1:
        change = set_to(job, "num_virtual_stages_per_pipeline_rank", [2])
        yield f"{named} needs virtual stages in a pipeline", change
    if whole(job, "mtp_num_layers", 0) > 1:
        text = f"{named} accepts one layer for multi-token prediction, but {job.spell('mtp_num_layers')} is "
        yield text + f"{whole(job, 'mtp_num_layers')}", set_to(job, "mtp_num_layers", [1])
    elif whole(job, "mtp_num_layers", 0) == 1 and pipeline_size(job) == 1:
        text = f"{named} with multi-token prediction needs a pipeline"
        yield text, set_to(job, "pipeline_model_parallel_size", [2])


def _lengths(job: Job) -> Iterator[tuple[str, str]]:
    varying = job.get("variable_seq_lengths") and job.get("num_experts")
    if varying and job.get("moe_token_dispatcher_type", "allgather") == "allgather":
        text = f"{job.spell('variable_seq_lengths')} needs a token dispatcher other than allgather"
        yield text, f"{job.spell('moe_token_dispatcher_type')} alltoall"


def _gathering(job: Job) -> Iterator[tuple[str, str]]:
    """Megatron's conditions for overlapped gathers of parameters (`validate_args`)."""
    named = job.spell("overlap_param_gather")
    if not unchecked(job) or not job.get("overlap_param_gather"):
        return
    if not (job.get("use_distributed_optimizer") or job.get("use_megatron_fsdp")):
        yield f"{named} needs a distributed optimizer", job.spell("use_distributed_optimizer")
    if not job.get("overlap_grad_reduce"):
        yield f"{named} needs {job.spell('overlap_grad_reduce')}", job.spell("overlap_grad_reduce")
    stepped = "overlap_param_gather_with_optimizer_step"
    if job.get(stepped) and chunks_of(job) == 1:
        text = f"{job.spell(stepped)} needs virtual stages"
        yield text, set_to(job, "num_virtual_stages_per_pipeline_rank", [2])


def _instances(job: Job) -> Iterator[tuple[str, str]]:
    """The number of parts of the data-parallel ranks that each shard the optimizer (`initialize_model_parallel`)."""
    parts = whole(job, "num_distributed_optimizer_instances")
    ranks = whole(job, "data_parallel_size") * whole(job, "context_parallel_size")
    if ranks % parts:
        text = f"{ranks} data- and context-parallel ranks cannot be divided by "
        text += f"{job.spell('num_distributed_optimizer_instances')} {parts}"
        yield text, without(job, "num_distributed_optimizer_instances")


def _sequence_parallel(job: Job) -> Iterator[tuple[str, str]]:
    """Sequence parallelism without tensor parallelism. Megatron's script and verl turn it off; Megatron's config, which
    Megatron-Bridge makes, refuses it."""
    alone = job.get("sequence_parallel") and whole(job, "tensor_model_parallel_size") == 1
    if alone and job.framework == "megatron-bridge":
        named = job.spell("sequence_parallel")
        text = f"{named} needs tensor parallelism, but {job.spell('tensor_model_parallel_size')} is 1"
        yield text, without(job, "sequence_parallel")


def _precision(job: Job) -> Iterator[tuple[str, str]]:
    if job.get("bf16") and job.get("fp16"):
        yield f"{job.spell('bf16')} and {job.spell('fp16')} are both set", without(job, "fp16")
    if job.get("fp8") and job.get("fp4"):
        yield (
            f"{job.spell('fp8')} and {job.spell('fp4')} are both set",
            either(without(job, "fp8"), without(job, "fp4")),
        )


FEATURES = (
    Rule("recomputation", ("recompute_granularity", "recompute_method", "recompute_num_layers"), _recomputation),
    Rule(
        "pipeline-of-a-feature",
        (*_WITHOUT_PIPELINE, "defer_embedding_wgrad_compute", "pipeline_model_parallel_size"),
        _without_pipeline,
    ),
    Rule(
        "offloading-in-a-pipeline",
        ("cpu_offloading", "pipeline_model_parallel_size", "recompute_granularity"),
        _offloading,
    ),
    Rule("combined-1f1b", (_COMBINED, *_NEEDS_COMBINED), _combined),
    Rule("lengths-of-tokens", ("variable_seq_lengths", "moe_token_dispatcher_type"), _lengths),
    Rule("overlapped-gather", ("overlap_param_gather", "overlap_grad_reduce", "use_distributed_optimizer"), _gathering),
    Rule("optimizer-instances", ("num_distributed_optimizer_instances", "data_parallel_size"), _instances),
    Rule("sequence-parallel-alone", ("sequence_parallel", "tensor_model_parallel_size"), _sequence_parallel),
    Rule("two-precisions", ("bf16", "fp16", "fp8", "fp4"), _precision),
)
