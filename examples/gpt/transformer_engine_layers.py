"""GPT layers from Transformer Engine's fused modules, in FP8 where asked for.

Written against the documented interface of Transformer Engine 1.13 to 2.18. Never run on a GPU so far. Weights start as
those of the local layers do, to the bit. The GELU is the tanh approximation; that of the local layers is exact.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt.layers import LayerParts, RotaryEmbedding, dropped


class TransformerEngineBlock(nn.Module):
    """One pre-norm transformer layer from four fused modules; arguments as those of TransformerEngineParts.

    Under FP8, copies of the weights are made in a step's first microbatch and kept for the others:
    ``GPTStage.set_is_first_microbatch`` sets ``is_first_microbatch``, the first forward clears it.
    """

    def __init__(self, te: Any, config: Any, layer: int, device: torch.device, split: bool, fp8: bool) -> None:
        super().__init__()
        hidden, epsilon, self.num_heads = config.hidden_size, config.layernorm_epsilon, config.num_attention_heads
        common: dict[str, Any] = {"bias": False, "params_dtype": torch.float32, "device": device}
        if split:  # older releases do not have the keyword
            common["delay_wgrad_compute"] = True
        self.qkv = te.LayerNormLinear(hidden, 3 * hidden, eps=epsilon, **common)
        self.core_attention = te.DotProductAttention(
            self.num_heads,
            hidden // self.num_heads,
            attention_dropout=config.attention_dropout,
            qkv_format="sbhd",
            attn_mask_type="causal",
            layer_number=layer + 1,
        )
        self.proj = te.Linear(hidden, hidden, **common)
        self.feed_forward = te.LayerNormMLP(hidden, config.ffn_hidden_size, eps=epsilon, activation="gelu", **common)
        self.hidden_dropout = config.hidden_dropout
        self.fp8, self.is_first_microbatch = fp8, True

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """``[s, b, h]`` to ``[s, b, h]``, same dtype."""
        first = self.is_first_microbatch if self.fp8 else None  # None: nothing is kept between microbatches
        x = x + dropped(self, self._attention(x, rotary, first)).to(x.dtype)
        x = x + dropped(self, self.feed_forward(x, is_first_microbatch=first)).to(x.dtype)
        self.is_first_microbatch = False
        return x

    def _attention(self, x: Tensor, rotary: RotaryEmbedding, first: bool | None) -> Tensor:
        s, b, h = x.shape
        qkv = self.qkv(x, is_first_microbatch=first).view(s, b, 3, self.num_heads, h // self.num_heads)
        query, key, value = qkv.unbind(2)  # each [s, b, heads, head_dim]
        # To [b, heads, s, head_dim] and back.
        query, key = (rotary(part.permute(1, 2, 0, 3)).permute(2, 0, 1, 3).contiguous() for part in (query, key))
        context = self.core_attention(query, key, value.contiguous())
        return self.proj(context.reshape(s, b, h), is_first_microbatch=first)


class TransformerEngineParts(LayerParts):
    """LayerParts from ``te``, the module transformer_engine.pytorch.

    ``split``: leave weight gradients to ``backward_dw()``. ``recipe``: of FP8, or None; ``replicas``: the ranks that
    hold the same weights, over which FP8's largest values are reduced, or None.
    """

    def __init__(self, te: Any, device: torch.device, split: bool, recipe: Any = None, replicas: Any = None) -> None:
        super().__init__(te.LayerNorm)
        self.te, self.device, self.split = te, device, split
        self.recipe, self.replicas = recipe, replicas

    def block(self, config: Any, layer: int) -> nn.Module:
        return TransformerEngineBlock(self.te, config, layer, self.device, self.split, fp8=self.recipe is not None)

    def forward_context(self) -> AbstractContextManager[Any]:
        """One FP8 region a microbatch: the largest values are reduced where it ends."""
        if self.recipe is None:
            return nullcontext()
        if hasattr(self.te, "autocast"):  # the name since 2.9
            return self.te.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.replicas)
        return self.te.fp8_autocast(enabled=True, fp8_recipe=self.recipe, fp8_group=self.replicas)

    def checkpointed(self, block: nn.Module, hidden: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """torch's own checkpointing would compute again with another FP8 scale."""
        output: Tensor = self.te.checkpoint(block, hidden, rotary, use_reentrant=False)
        return output
