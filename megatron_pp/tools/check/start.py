"""What would end a job at its start or in its first step: every refusal of Megatron's and of this engine's, at once.

Where Megatron's own checks have run, their refusals are known from reading. The rules below find the same and more
without them, such as what a schedule refuses in its first step, and say which value would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_pp.errors import MegatronPPError
from megatron_pp.tools.check.findings import ERROR, NOTE, Finding, Section
from megatron_pp.tools.check.job import Job
from megatron_pp.tools.check.stages import Stage, chunks_of, microbatches_of, pipeline_size, stages_of


@dataclass(frozen=True)
class Rule:
    """``broken(job)``: what is wrong and what would be right, or nothing. Its settings are those that it reads."""

    name: str
    settings: tuple[str, ...]
    broken: Callable[[Job], Iterator[tuple[str, str]]]
    level: str = ERROR


def section(job: Job) -> Section:
    """Refusals of Megatron's that reading found, each with the value that a rule knows, then those of rules alone."""
    of_rules = [*_found_by_rules(job)]
    findings, used = [], set()
    for read in (one for one in job.found if one.level != NOTE):
        same = next((one for one in of_rules if one.name not in used and _are_of_one_thing(read, one)), None)
        if same is None:
            findings.append(read)
            continue
        used.add(same.name)
        findings.append(replace(read, change=read.change or same.change))
    findings += [one for one in of_rules if one.name not in used]
    return Section("start", (), tuple(findings), {"validated": job.validated})


def _found_by_rules(job: Job) -> Iterator[Finding]:
    for rule in RULES:
        for text, change in rule.broken(job):
            yield Finding(rule.name, rule.level, text, change, rule.settings)


def _are_of_one_thing(read: Finding, rule: Finding) -> bool:
    """Whether Megatron's refusal reads two settings of the rule, or its only one."""
    ours, theirs = set(rule.settings), set(read.settings)
    return len(ours & theirs) >= min(2, len(ours), len(theirs)) > 0


def _whole(job: Job, name: str, default: int = 1) -> int:
    value = job.get(name, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def nearest(value: int, factor: int) -> str:
    """Multiples of ``factor`` beside ``value``: "60 or 64"."""
    below = value // factor * factor
    found = [number for number in (below, below + factor) if number > 0 and number != value]
    return " or ".join(map(str, found))


def _divisors_near(whole: int, value: int) -> list[int]:
    """Numbers that divide ``whole``: the largest below ``value`` and the smallest above it."""
    below = next((one for one in range(min(value - 1, whole), 0, -1) if whole % one == 0), None)
    above = next((one for one in range(value + 1, whole + 1) if whole % one == 0), None)
    return [one for one in (below, above) if one is not None]


def _set(job: Job, name: str, values: Sequence[int] | str) -> str:
    text = values if isinstance(values, str) else " or ".join(map(str, values))
    return f"{job.spell(name)} {text}" if text else ""


def _either(*changes: str) -> str:
    return ", or ".join(change for change in changes if change)


_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def _world(job: Job) -> Iterator[tuple[str, str]]:
    tensor, pipeline, context = (_whole(job, name) for name in _MODEL_PARALLEL)
    dense = tensor * pipeline * context
    if job.gpus % dense:
        given = " x ".join(f"{job.spell(name)} {_whole(job, name)}" for name in _MODEL_PARALLEL)
        yield f"{job.gpus} GPUs cannot be divided by {given} = {dense}", f"{nearest(job.gpus, dense)} GPUs"


def _layers(job: Job) -> Iterator[tuple[str, str]]:
    if not _whole(job, "num_layers", 0) and not job.get("hybrid_layer_pattern"):
        return
    try:
        stages = stages_of(job)
    except MegatronPPError as error:
        stages_wanted = pipeline_size(job) * chunks_of(job)
        explicit = job.get("pipeline_model_parallel_layout") or "|" in str(job.get("hybrid_layer_pattern", ""))
        ends = any(job.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
        change = "" if explicit or ends else _with_other_layers(job, stages_wanted)
        yield str(error), change
        return
    yield from _letters(job, stages)


def _with_other_layers(job: Job, stages: int) -> str:
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    counted = _whole(job, "num_layers") + sum(bool(job.get(name)) for name in names)
    left = counted % stages
    if stages - left == 2 and not any(map(job.get, names)):
        return f"{job.spell(names[0])} {job.spell(names[1])}"
    return _set(job, "num_layers", nearest(_whole(job, "num_layers"), stages)) if not any(map(job.get, names)) else ""


def _letters(job: Job, stages: Sequence[Stage]) -> Iterator[tuple[str, str]]:
    """A layout must have what the model has."""
    layout = job.get("pipeline_model_parallel_layout")
    if not isinstance(layout, str):
        return
    spelled = job.spell("pipeline_model_parallel_layout")
    layers, mtp = sum(len(one.layers) for one in stages), sum(one.mtp for one in stages)
    if layers != _whole(job, "num_layers", 0):
        text = f"{spelled} has {layers} layers (t), {job.spell('num_layers')} is {_whole(job, 'num_layers', 0)}"
        yield text, _set(job, "num_layers", [layers])
    if mtp != _whole(job, "mtp_num_layers", 0):
        text = f"{spelled} has {mtp} layers for multi-token prediction (m), {job.spell('mtp_num_layers')} is "
        yield text + f"{_whole(job, 'mtp_num_layers', 0)}", _set(job, "mtp_num_layers", [mtp])
    if [one.embedding for one in stages] != [True] + [False] * (len(stages) - 1):
        yield f"{spelled} must have the embedding (E) in its first stage, and nowhere else", ""
    if [one.loss for one in stages] != [False] * (len(stages) - 1) + [True]:
        yield f"{spelled} must have the loss (L) in its last stage, and nowhere else", ""


def _batch(job: Job) -> Iterator[tuple[str, str]]:
    micro, replicas = _whole(job, "micro_batch_size"), _whole(job, "data_parallel_size")
    batch = _whole(job, "global_batch_size", 0)
    if batch and micro * replicas and batch % (micro * replicas):
        yield (
            f"{job.spell('global_batch_size')} {batch} cannot be divided by {job.spell('micro_batch_size')} {micro} "
            f"x {replicas} data-parallel ranks = {micro * replicas}",
            _set(job, "global_batch_size", nearest(batch, micro * replicas)),
        )


def _interleaved(job: Job) -> Iterator[tuple[str, str]]:
    """What Megatron's interleaved schedule raises in the first step (`get_schedule_table`, `schedules.py`)."""
    size, chunks = pipeline_size(job), chunks_of(job)
    if size == 1 or chunks == 1:
        return
    try:
        count = microbatches_of(job)
    except MegatronPPError:
        return
    group = _whole(job, "microbatch_group_size_per_vp_stage", size)
    named = job.spell("microbatch_group_size_per_vp_stage")
    if group < size or group > count:
        most = f"at least the pipeline's {size} ranks and at most the {count} microbatches of a step"
        change = _set(job, "microbatch_group_size_per_vp_stage", [size]) if size <= count else ""
        change = change or _set(job, "global_batch_size", [size * _whole(job, "global_batch_size") // count])
        text = f"a chunk's group has {group} microbatches ({named}); Megatron's schedule takes {most}"
        yield text, _either(change, "install(), whose schedules take any number of microbatches")
    elif 0 < count % group < size:
        each = _whole(job, "global_batch_size") // count
        text = f"a step has {count} microbatches in groups of {group}; the last group has {count % group}, and "
        text += f"Megatron's schedule takes no fewer than the pipeline's {size} ranks there"
        each, below = _whole(job, "global_batch_size") // count, count // group * group
        batches = _set(job, "global_batch_size", [below * each, (below + group) * each])
        yield text, _either(batches, "install(), whose schedules take any number of microbatches")


def _two_ranks(job: Job) -> Iterator[tuple[str, str]]:
    if pipeline_size(job) == 2 and chunks_of(job) > 1 and not job.get("overlap_p2p_comm", False):
        yield (
            "Megatron's interleaved schedule on 2 ranks needs the overlap of transfers",
            _either("leave --no-overlap-p2p-communication out", "install(), which runs it in any way"),
        )


def _heads(job: Job) -> Iterator[tuple[str, str]]:
    tensor, heads = _whole(job, "tensor_model_parallel_size"), _whole(job, "num_attention_heads", 0)
    if heads and heads % tensor:
        text = f"{job.spell('num_attention_heads')} {heads} cannot be divided by "
        text += f"{job.spell('tensor_model_parallel_size')} {tensor}"
        yield text, _set(job, "tensor_model_parallel_size", _divisors_near(heads, tensor))


def _groups(job: Job) -> Iterator[tuple[str, str]]:
    tensor, groups = _whole(job, "tensor_model_parallel_size"), _whole(job, "num_query_groups", 0)
    if job.get("group_query_attention") and groups and groups % tensor and tensor % groups:
        text = f"{job.spell('num_query_groups')} {groups} is no multiple and no divisor of "
        text += f"{job.spell('tensor_model_parallel_size')} {tensor}"
        yield text, _set(job, "tensor_model_parallel_size", _divisors_near(groups, tensor))


def _sequence(job: Job) -> Iterator[tuple[str, str]]:
    length, context = _whole(job, "seq_length", 0), _whole(job, "context_parallel_size")
    split = 2 * context if context > 1 else 1
    split *= _whole(job, "tensor_model_parallel_size") if job.get("sequence_parallel") else 1
    if length and length % split:
        parts = f"{'2 x context-parallel' if context > 1 else ''}"
        parts += " x " if context > 1 and job.get("sequence_parallel") else ""
        parts += "tensor-parallel" if job.get("sequence_parallel") else ""
        text = f"{job.spell('seq_length')} {length} cannot be divided by {parts} ranks = {split}"
        yield text, _set(job, "seq_length", nearest(length, split))


def _experts(job: Job) -> Iterator[tuple[str, str]]:
    experts, ranks = _whole(job, "num_experts", 0), _whole(job, "expert_model_parallel_size")
    if not experts:
        if ranks > 1:
            named = job.spell("expert_model_parallel_size")
            yield f"{named} is {ranks}, and the model has no experts", f"leave {named} out"
        return
    if experts % ranks:
        yield (
            f"{job.spell('num_experts')} {experts} cannot be divided by {job.spell('expert_model_parallel_size')} "
            f"{ranks}",
            _set(job, "expert_model_parallel_size", _divisors_near(experts, ranks)),
        )


def _expert_ranks(job: Job) -> Iterator[tuple[str, str]]:
    if not _whole(job, "num_experts", 0):
        return
    ranks, split = _whole(job, "expert_model_parallel_size"), _whole(job, "expert_tensor_parallel_size")
    whole = ranks * split * pipeline_size(job)
    if job.gpus % whole:
        each = job.gpus // pipeline_size(job) // split
        yield (
            f"{job.gpus} GPUs cannot be divided by {job.spell('expert_model_parallel_size')} {ranks} x "
            f"{job.spell('expert_tensor_parallel_size')} {split} x {pipeline_size(job)} pipeline ranks = {whole}",
            _set(job, "expert_model_parallel_size", _divisors_near(each, ranks) if each else ""),
        )


def _experts_with_tensors(job: Job) -> Iterator[tuple[str, str]]:
    tensor = _whole(job, "tensor_model_parallel_size")
    if _whole(job, "num_experts", 0) and tensor > 1 and not job.get("sequence_parallel"):
        yield "experts beside tensor parallelism need sequence parallelism", job.spell("sequence_parallel")


def _routed(job: Job) -> Iterator[tuple[str, str]]:
    experts, each = _whole(job, "num_experts", 0), _whole(job, "moe_router_topk", 2)
    if experts and each > experts:
        text = f"{job.spell('moe_router_topk')} {each} is more than {job.spell('num_experts')} {experts}"
        yield text, _set(job, "moe_router_topk", [experts])


def _recomputation(job: Job) -> Iterator[tuple[str, str]]:
    how, method = job.get("recompute_granularity"), job.get("recompute_method")
    if how == "full" and method is None:
        yield (
            f"{job.spell('recompute_granularity')} full needs {job.spell('recompute_method')}",
            f"{job.spell('recompute_method')} uniform {job.spell('recompute_num_layers')} 1",
        )
    if how == "selective" and method is not None:
        named = job.spell("recompute_method")
        yield f"{named} is for {job.spell('recompute_granularity')} full", f"leave {named} out"


def _offloading(job: Job) -> Iterator[tuple[str, str]]:
    if job.get("cpu_offloading") and pipeline_size(job) > 1:
        named = job.spell("cpu_offloading")
        yield f"Megatron's {named} refuses a pipeline", f"leave {named} out"


def _combined(job: Job) -> Iterator[tuple[str, str]]:
    """Megatron's conditions of `overlap_moe_expert_parallel_comm` (`TransformerConfig`)."""
    if not job.get("overlap_moe_expert_parallel_comm"):
        return
    named = job.spell("overlap_moe_expert_parallel_comm")
    if _whole(job, "expert_model_parallel_size") == 1:
        yield f"{named} needs expert parallelism", _set(job, "expert_model_parallel_size", [2])
    if job.get("moe_token_dispatcher_type", "allgather") not in ("alltoall", "flex"):
        yield f"{named} needs another dispatcher", f"{job.spell('moe_token_dispatcher_type')} alltoall"
    if job.get("recompute_granularity") == "full":
        yield f"{named} refuses full recomputation", f"{job.spell('recompute_granularity')} selective"
    if not (job.get("bf16") or job.get("fp16") or job.get("params_dtype") in ("bfloat16", "float16")):
        yield f"{named} needs 16-bit parameters", job.spell("bf16")
    if pipeline_size(job) > 1 and chunks_of(job) == 1:
        change = _set(job, "num_virtual_stages_per_pipeline_rank", [2])
        yield f"{named} needs virtual stages in a pipeline", change


def _precision(job: Job) -> Iterator[tuple[str, str]]:
    if job.get("bf16") and job.get("fp16"):
        yield f"{job.spell('bf16')} and {job.spell('fp16')} are both set", f"leave {job.spell('fp16')} out"


_CHUNKS = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
_PLACED = (
    *("num_layers", "pipeline_model_parallel_size", "pipeline_model_parallel_layout", "mtp_num_layers", *_CHUNKS),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "hybrid_layer_pattern"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
RULES = (
    Rule("gpus-of-the-layout", (*_MODEL_PARALLEL, "world_size"), _world),
    Rule("layers-on-stages", _PLACED, _layers),
    Rule("global-batch", ("global_batch_size", "micro_batch_size", "data_parallel_size"), _batch),
    Rule(
        "microbatches-of-the-last-group",
        ("global_batch_size", "microbatch_group_size_per_vp_stage", "pipeline_model_parallel_size"),
        _interleaved,
    ),
    Rule("interleaved-on-two-ranks", ("overlap_p2p_comm", "pipeline_model_parallel_size"), _two_ranks),
    Rule("attention-heads", ("num_attention_heads", "tensor_model_parallel_size"), _heads),
    Rule("query-groups", ("num_query_groups", "tensor_model_parallel_size"), _groups),
    Rule("sequence-length", ("seq_length", "context_parallel_size", "sequence_parallel"), _sequence),
    Rule("experts-on-ranks", ("num_experts", "expert_model_parallel_size"), _experts),
    Rule("gpus-of-the-experts", ("expert_model_parallel_size", "expert_tensor_parallel_size"), _expert_ranks),
    Rule("experts-without-sequence-parallelism", ("sequence_parallel", "num_experts"), _experts_with_tensors),
    Rule("experts-of-a-token", ("moe_router_topk", "num_experts"), _routed),
    Rule("recomputation", ("recompute_granularity", "recompute_method", "recompute_num_layers"), _recomputation),
    Rule("offloading-in-a-pipeline", ("cpu_offloading", "pipeline_model_parallel_size"), _offloading),
    Rule("combined-1f1b", ("overlap_moe_expert_parallel_comm",), _combined),
    Rule("two-precisions", ("bf16", "fp16"), _precision),
)
"""In the order of an answer."""
