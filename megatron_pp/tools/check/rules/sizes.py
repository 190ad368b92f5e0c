"""Rules of model sizes that tensor, context and expert parallelism divide."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.rules.rule import MODEL_PARALLEL, Rule, divisors_near, nearest, set_to, unchecked, whole
from megatron_pp.tools.check.stages import pipeline_size

_NUMBERS = (
    *MODEL_PARALLEL,
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("micro_batch_size", "global_batch_size", "num_layers", "hidden_size", "num_attention_heads", "seq_length"),
)


def _below_one(job: Job) -> Iterator[tuple[str, str]]:
    for name in _NUMBERS:
        value = job.args.get(name)
        if isinstance(value, int) and value < 1:
            yield f"{job.spell(name)} is {value}; it must be at least 1", ""


def _heads(job: Job) -> Iterator[tuple[str, str]]:
    tensor = whole(job, "tensor_model_parallel_size")
    heads = whole(job, "num_attention_heads", 0)
    if heads and heads % tensor:
        text = f"{job.spell('num_attention_heads')} {heads} cannot be divided by "
        text += f"{job.spell('tensor_model_parallel_size')} {tensor}"
        yield text, set_to(job, "tensor_model_parallel_size", divisors_near(heads, tensor))


def _groups(job: Job) -> Iterator[tuple[str, str]]:
    tensor = whole(job, "tensor_model_parallel_size")
    groups = whole(job, "num_query_groups", 0)
    if job.get("group_query_attention") and groups and groups % tensor and tensor % groups:
        text = f"{job.spell('num_query_groups')} {groups} is neither a multiple nor a divisor of "
        text += f"{job.spell('tensor_model_parallel_size')} {tensor}"
        yield text, set_to(job, "tensor_model_parallel_size", divisors_near(groups, tensor))


def _width(job: Job) -> Iterator[tuple[str, str]]:
    hidden = whole(job, "hidden_size", 0)
    heads = whole(job, "num_attention_heads", 0)
    if unchecked(job) and hidden and heads and hidden % heads and not job.given.get("kv_channels"):
        text = f"{job.spell('hidden_size')} {hidden} cannot be divided by {job.spell('num_attention_heads')} {heads}"
        yield text, set_to(job, "num_attention_heads", divisors_near(hidden, heads))


def _vocabulary(job: Job) -> Iterator[tuple[str, str]]:
    words = whole(job, "padded_vocab_size", 0)
    tensor = whole(job, "tensor_model_parallel_size")
    if words and words % tensor:
        text = f"{job.spell('padded_vocab_size')} {words} cannot be divided by "
        text += f"{job.spell('tensor_model_parallel_size')} {tensor}"
        yield text, set_to(job, "padded_vocab_size", [-(-words // tensor) * tensor])


def _sequence(job: Job) -> Iterator[tuple[str, str]]:
    """The sequence length. A context-parallel rank has two pieces of a sequence; sequence parallelism divides them."""
    length = whole(job, "seq_length", 0)
    context = whole(job, "context_parallel_size")
    tensor = whole(job, "tensor_model_parallel_size") if job.get("sequence_parallel") else 1
    split = math.lcm(2 * context if context > 1 else 1, context * tensor)
    if length and length % split:
        parts = [f"2 x {job.spell('context_parallel_size')} {context}"] if context > 1 else []
        if tensor > 1:
            beside = f"{job.spell('context_parallel_size')} {context} x " if context > 1 else ""
            parts.append(f"{beside}{job.spell('tensor_model_parallel_size')} {tensor}")
        text = f"{job.spell('seq_length')} {length} cannot be divided by {' and by '.join(parts)}"
        yield text, set_to(job, "seq_length", nearest(length, split))


def _positions(job: Job) -> Iterator[tuple[str, str]]:
    length = whole(job, "seq_length", 0)
    most = whole(job, "max_position_embeddings", 0)
    if unchecked(job) and 0 < most < length:
        text = f"{job.spell('max_position_embeddings')} {most} is less than {job.spell('seq_length')} {length}"
        yield text, set_to(job, "max_position_embeddings", [length])


def _heads_of_context(job: Job) -> Iterator[tuple[str, str]]:
    """The number of heads: all-to-all context parallelism gives each rank a part of them. Transformer Engine raises in
    the first step if they cannot be divided."""
    kinds = job.get("cp_comm_type", [])
    context = whole(job, "context_parallel_size")
    tensor = whole(job, "tensor_model_parallel_size")
    if context == 1 or "a2a" not in ([kinds] if isinstance(kinds, str) else kinds):
        return
    for name in ("num_attention_heads", "num_query_groups"):
        heads = whole(job, name, 0)
        if heads and heads % tensor == 0 and (heads // tensor) % context:
            text = f"{job.spell('cp_comm_type')} a2a needs {job.spell(name)} {heads} / {tensor} tensor-parallel ranks "
            text += f"to be a multiple of {job.spell('context_parallel_size')} {context}"
            yield text, f"{job.spell('cp_comm_type')} p2p"
            return


def _levels_of_context(job: Job) -> Iterator[tuple[str, str]]:
    given = job.get("hierarchical_context_parallel_sizes")
    levels = [int(one) for one in given if str(one).isdigit()] if isinstance(given, (list, tuple)) else []
    context = whole(job, "context_parallel_size")
    kinds = job.get("cp_comm_type", [])
    named = job.spell("hierarchical_context_parallel_sizes")
    if levels and math.prod(levels) != context:
        text = f"{named} {' x '.join(map(str, levels))} is not {job.spell('context_parallel_size')} {context}"
        yield text, set_to(job, "context_parallel_size", [math.prod(levels)])
    elif not given and "a2a+p2p" in ([kinds] if isinstance(kinds, str) else kinds):
        yield f"{job.spell('cp_comm_type')} a2a+p2p needs {named}", f"{named} A B with A x B = {context}"


def _experts(job: Job) -> Iterator[tuple[str, str]]:
    experts = whole(job, "num_experts", 0)
    ranks = whole(job, "expert_model_parallel_size")
    if not experts:
        is_known = bool(job.get("num_layers") or job.get("hybrid_layer_pattern"))  # a model's file may not be here
        if ranks > 1 and is_known:
            named = job.spell("expert_model_parallel_size")
            yield f"{named} is {ranks}, but the model has no experts", f"leave {named} out"
        return
    if experts % ranks:
        yield (
            f"{job.spell('num_experts')} {experts} cannot be divided by {job.spell('expert_model_parallel_size')} "
            f"{ranks}",
            set_to(job, "expert_model_parallel_size", divisors_near(experts, ranks)),
        )


def _expert_ranks(job: Job) -> Iterator[tuple[str, str]]:
    if not whole(job, "num_experts", 0):
        return
    ranks = whole(job, "expert_model_parallel_size")
    split = whole(job, "expert_tensor_parallel_size")
    together = ranks * split * pipeline_size(job)
    if job.gpus % together:
        each = job.gpus // pipeline_size(job) // split
        yield (
            f"{job.gpus} GPUs cannot be divided by {job.spell('expert_model_parallel_size')} {ranks} x "
            f"{job.spell('expert_tensor_parallel_size')} {split} x {pipeline_size(job)} pipeline ranks = {together}",
            set_to(job, "expert_model_parallel_size", divisors_near(each, ranks) if each else ""),
        )


def _experts_with_tensors(job: Job) -> Iterator[tuple[str, str]]:
    tensor = whole(job, "tensor_model_parallel_size")
    if whole(job, "num_experts", 0) and tensor > 1 and not job.get("sequence_parallel"):
        yield "experts together with tensor parallelism need sequence parallelism", job.spell("sequence_parallel")


def _routed(job: Job) -> Iterator[tuple[str, str]]:
    experts = whole(job, "num_experts", 0)
    each = whole(job, "moe_router_topk", 2)
    if experts and each > experts:
        text = f"{job.spell('moe_router_topk')} {each} is more than {job.spell('num_experts')} {experts}"
        yield text, set_to(job, "moe_router_topk", [experts])


SIZES = (
    Rule("sizes-below-one", _NUMBERS, _below_one),
    Rule("attention-heads", ("num_attention_heads", "tensor_model_parallel_size"), _heads),
    Rule("query-groups", ("num_query_groups", "tensor_model_parallel_size"), _groups),
    Rule("width-of-heads", ("hidden_size", "num_attention_heads"), _width),
    Rule("vocabulary", ("padded_vocab_size", "tensor_model_parallel_size"), _vocabulary),
    Rule("sequence-length", ("seq_length", "context_parallel_size", "sequence_parallel"), _sequence),
    Rule("positions", ("max_position_embeddings", "seq_length"), _positions),
    Rule(
        "heads-of-context-parallelism",
        ("cp_comm_type", "num_attention_heads", "num_query_groups", "context_parallel_size"),
        _heads_of_context,
    ),
    Rule("levels-of-context-parallelism", ("hierarchical_context_parallel_sizes", "cp_comm_type"), _levels_of_context),
    Rule("experts-on-ranks", ("num_experts", "expert_model_parallel_size"), _experts),
    Rule("gpus-of-the-experts", ("expert_model_parallel_size", "expert_tensor_parallel_size"), _expert_ranks),
    Rule("experts-without-sequence-parallelism", ("sequence_parallel", "num_experts"), _experts_with_tensors),
    Rule("experts-of-a-token", ("moe_router_topk", "num_experts"), _routed),
)
