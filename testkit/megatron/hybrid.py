"""Megatron-core's HybridModel on the CPU, with attention and MLP layers made of Megatron's own modules."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from testkit.megatron.cases import Model


def hybrid_model(config: Any, model: Model, **place: Any) -> Any:
    """A chunk of the model with the layers of the pattern ``model.hybrid``: "*" attention, "-" MLP, "|" the end of a
    stage, and after "/" the layers that predict one more token."""
    block = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    block.TENorm = WrappedTorchNorm  # type: ignore[attr-defined]  # what it imports, Transformer Engine's, has no CPU
    kind = importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
    return kind(
        config,
        ModuleSpec(module=block.HybridStack, submodules=_layers(block)),
        vocab_size=model.vocab,
        max_sequence_length=model.seq,
        hybrid_layer_pattern=model.hybrid,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=model.position,
        **place,
    )


def _layers(block: Any) -> Any:
    gpt = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=gpt.input_layernorm, self_attention=gpt.self_attention, self_attn_bda=gpt.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=gpt.pre_mlp_layernorm, mlp=gpt.mlp, mlp_bda=gpt.mlp_bda)
    layer = importlib.import_module("megatron.core.ssm.mlp_layer").MLPLayer
    further = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm, hnorm=WrappedTorchNorm, eh_proj=ColumnParallelLinear, layer_norm=WrappedTorchNorm
    )
    of_tokens = ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=further)
    return block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=layer, submodules=mlp),
        mtp_block_spec=ModuleSpec(
            module=mtp.MultiTokenPredictionBlock,
            submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[of_tokens]),
        ),
    )
