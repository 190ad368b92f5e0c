"""Computes sizes and defaults as Megatron's own checks would, for settings on which these checks have not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pp.config.hybrid_pattern import HybridPattern
from megatron_pp.tools.flags.read import defaults as of_parser
from megatron_pp.tools.parity.layout import stages_of


def completed(given: Mapping[str, Any], gpus: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All settings: the given ones, then ``defaults`` of the program, then the defaults of Megatron's parser, and the
    sizes that Megatron's `validate_args` computes from them. A size that cannot be computed is missing."""
    args = {**of_parser(), **defaults, **{name: value for name, value in given.items() if value is not None}}
    args["world_size"] = gpus
    parallel = [_size(args, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context")]
    dense = parallel[0] * parallel[1] * parallel[2]
    args["data_parallel_size"] = gpus // dense
    _fill(args, "expert_tensor_parallel_size", args.get("tensor_model_parallel_size"))
    if layers := HybridPattern.read(args.get("hybrid_layer_pattern")).layers:
        args["num_layers"] = len(layers)
    heads = args.get("num_attention_heads")
    hidden = args.get("hidden_size")
    if isinstance(hidden, int):
        _fill(args, "ffn_hidden_size", int(4 * hidden * 2 / 3 / 64) * 64 if args.get("swiglu") else 4 * hidden)
        if isinstance(heads, int) and heads:
            _fill(args, "kv_channels", hidden // heads)
    if given.get("num_query_groups") not in (None, heads):
        args["group_query_attention"] = True
    if given.get("kv_lora_rank") is not None:
        args["multi_latent_attention"] = True
    if not args.get("group_query_attention"):
        args["num_query_groups"] = heads
    if args.get("num_experts"):
        _fill(args, "moe_ffn_hidden_size", args.get("ffn_hidden_size"))
    if isinstance(args.get("micro_batch_size"), int):
        _fill(args, "global_batch_size", args["micro_batch_size"] * max(1, args["data_parallel_size"]))
    args["virtual_pipeline_model_parallel_size"] = _chunks(args, parallel[1])
    _pad_vocabulary(args)
    args["params_dtype"] = "float16" if args.get("fp16") else "bfloat16" if args.get("bf16") else "float32"
    if args["virtual_pipeline_model_parallel_size"] is None:
        args["overlap_p2p_comm"] = False
    if given.get("batch_p2p_comm") is None and "batch_p2p_comm" not in defaults:
        args["batch_p2p_comm"] = not args["overlap_p2p_comm"]
    return args


def _size(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    return value if isinstance(value, int) and value > 0 else 1


def _fill(args: dict[str, Any], name: str, value: Any) -> None:
    if args.get(name) is None and value is not None:
        args[name] = value


def _chunks(args: Mapping[str, Any], stages: int) -> int | None:
    """Megatron's `virtual_pipeline_model_parallel_size`: None for one chunk per rank."""
    number = args.get("virtual_pipeline_model_parallel_size") or args.get("num_virtual_stages_per_pipeline_rank")
    layers = args.get("num_layers")
    each = args.get("num_layers_per_virtual_pipeline_stage")
    layout = args.get("pipeline_model_parallel_layout")
    if not number and isinstance(layout, str):
        number = len(stages_of(layout)) // stages
    pattern = HybridPattern.read(args.get("hybrid_layer_pattern"))
    if not number and pattern.names_stages:
        number = len(pattern.stages) // stages
    if not number and isinstance(layout, list):
        number = len(layout) // stages
    if not number and isinstance(layers, int) and isinstance(each, int) and each:
        extra = [args.get(f"account_for_{name}_in_pipeline_split") for name in ("embedding", "loss")]
        number = (layers + sum(map(bool, extra))) // stages // each
    return number if isinstance(number, int) and number > 1 else None


_GPT2 = "GPT2BPETokenizer"
_WORDS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokenizers that always have the same number of words."""


def vocabulary_of(args: Mapping[str, Any]) -> int:
    """The padded number of words in the embedding; 0 if only the tokenizer's files have it."""
    if isinstance(args.get("padded_vocab_size"), int):
        return int(args["padded_vocab_size"])
    tokenizer = args.get("tokenizer_type") or (_GPT2 if args.get("merge_file") else None)
    known = {**args, "vocab_size": args.get("vocab_size") or _WORDS.get(str(tokenizer))}
    _pad_vocabulary(known)
    return int(known.get("padded_vocab_size") or 0)


def _pad_vocabulary(args: dict[str, Any]) -> None:
    vocabulary = args.get("vocab_size")
    if isinstance(vocabulary, int):
        multiple = _size(args, "make_vocab_size_divisible_by") * _size(args, "tensor_model_parallel_size")
        _fill(args, "padded_vocab_size", -(-vocabulary // multiple) * multiple)
