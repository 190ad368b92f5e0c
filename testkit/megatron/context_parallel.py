"""Context parallelism of Megatron-core on the CPU: each rank holds two of the 2 x CP pieces of a sequence.

Megatron's dense attention with context parallelism needs Transformer Engine; `megatron_pp.tools.parity.cpu.cpu_layers`
adds it to the plain attention. The sparse attention of Megatron's main branch (DSA) has it in plain torch. So with
`sparse_attention` the attention is also Megatron's.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_pp.tools.parity.cpu.cpu_layers import positions_of


def of_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of (micro_batch, sequence)."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tensor
    return tensor[:, positions_of(tensor.shape[1], parallel_state.get_context_parallel_rank(), size)]


class Linear(torch.nn.Linear):
    """A linear layer of the indexer, in place of Transformer Engine's. It is equal on all tensor-parallel ranks."""

    def __init__(self, inputs: int, outputs: int, **unused: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def sparse_attention() -> Any:
    """The spec of Megatron's multi-latent attention with its sparse core and indexer; needs a release after 0.19."""
    variants = "megatron.core.transformer.experimental_attention_variant"
    mla, dsa = (importlib.import_module(f"{variants}.{name}") for name in ("absorbed_mla", "dsa"))
    indexer = dsa.DSAIndexerSubmodules(
        linear_wq_b=Linear, linear_wk=Linear, k_norm=WrappedTorchNorm, linear_weights_proj=Linear
    )
    core = dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=indexer))
    into = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    return ModuleSpec(
        module=mla.AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=mla.AbsorbedMLASelfAttentionSubmodules(
            **dict.fromkeys(into, ColumnParallelLinear),
            core_attention=ModuleSpec(module=dsa.DSAttention, submodules=core),
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
