"""Makes a config and a GPTModel from flags of Megatron's training scripts, as Megatron-LM's own `gpt_builder` does.

Megatron-core does not have Megatron's parser, so the table of `megatron-pp check` reads the flags. A flag that this
module does not use is an error.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_pp.tools.flags.read import read_words
from megatron_pp.tools.flags.table import settings
from testkit.megatron.cases import Case

_ELSEWHERE = (
    # settings of the model that are not in its config
    *("seq_length", "max_position_embeddings", "position_embedding_type", "vocab_size", "make_vocab_size_divisible_by"),
    "rotary_base",
    *("untie_embeddings_and_output_weights", "swiglu", "group_query_attention", "num_experts"),
    # settings of the pipeline, the wrapper and the optimizer, which `lab` has from the Case
    *("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "use_distributed_optimizer"),
    *("overlap_grad_reduce", "overlap_param_gather", "micro_batch_size", "global_batch_size"),
)
"""Settings that are not fields of the config, and that this module or `lab` uses."""
_OF_THE_LOOP = (
    *("tokenizer_type", "mock_data", "train_iters", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "log_interval"),
    *("eval_iters", "eval_interval", "num_workers", "distributed_backend", "no_persist_layer_norm"),
    *("masked_softmax_fusion", "bias_gelu_fusion", "bias_swiglu_fusion"),
)
"""Settings of the data, of the length of training, and of kernels for GPUs, which are ignored."""


def config_of(case: Case) -> TransformerConfig:
    """The config that Megatron-LM's `core_transformer_config_from_args` makes of ``case.model.flags``."""
    read = read_words(case.model.flags)
    assert not read.unknown, f"no flags of Megatron's: {read.unknown}"
    assert not read.wrong, read.wrong
    given = read.given
    kind = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    fields = {field.name for field in dataclasses.fields(kind)}
    unused = [read.spelling[name] for name in given if name not in {*fields, *_ELSEWHERE, *_OF_THE_LOOP}]
    assert not unused, f"nothing uses {unused}"
    values: dict[str, Any] = {name: given[name] for name in fields & given.keys()}
    if "moe_layer_freq" in values:
        values["moe_layer_freq"] = _layers_of_experts(str(values["moe_layer_freq"]))
    if given.get("swiglu"):
        values |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    if not given.get("group_query_attention"):
        values["num_query_groups"] = None
    if "num_experts" in given:
        values |= {"num_moe_experts": given["num_experts"], "add_bias_linear": given.get("add_bias_linear", True)}
    overlap = case.policy.startswith("overlap")
    return kind(
        **values,
        virtual_pipeline_model_parallel_size=case.vp,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=case.deallocate,
        batch_p2p_comm=case.policy == "batched",
        overlap_p2p_comm=overlap,
    )


def _layers_of_experts(text: str) -> int | list[int]:
    """The value of a pattern such as ``([0]*3+[1]*58)``, as Megatron evaluates it."""
    if "[" not in text:
        return int(text)
    repeated = re.sub(r"\[(\d)\]\*(\d+)", lambda found: repr([int(found[1])] * int(found[2])), text)
    parts = repeated.strip("()").split("+")
    return [layer for part in parts for layer in ast.literal_eval(part)]


def build_flagged(case: Case, config: TransformerConfig, **place: Any) -> torch.nn.Module:
    """A model chunk. ``place`` has ``pre_process``, ``post_process`` and ``vp_stage``."""
    given = read_words(case.model.flags).given
    norm = config.normalization
    vp_stage = place["vp_stage"]
    if config.num_moe_experts:
        spec: Any = get_gpt_decoder_block_spec(config, False, normalization=norm, vp_stage=vp_stage)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=norm,
        )
    prediction = None
    if config.mtp_num_layers is not None:
        last = get_gpt_decoder_layer_specs(config, False, normalization=norm)[-1] if config.num_moe_experts else spec
        prediction = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config,
        spec,
        vocab_size=case.model.vocab,
        max_sequence_length=given["max_position_embeddings"],
        share_embeddings_and_output_weights=case.model.tied,
        position_embedding_type=given.get("position_embedding_type", settings()["position_embedding_type"].default),
        rotary_base=given.get("rotary_base", settings()["rotary_base"].default),
        mtp_block_spec=prediction,
        **place,
    )
