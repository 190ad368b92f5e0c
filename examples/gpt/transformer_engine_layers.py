"""GPT layers from Transformer Engine's fused modules, in FP8 where asked for.

Written against the documented interface of Transformer Engine 1.13 to 2.18: ``LayerNormLinear``, ``Linear``,
``LayerNormMLP`` and ``DotProductAttention`` of ``transformer_engine.pytorch``, which take ``is_first_microbatch`` and
``delay_wgrad_compute``. Never run on a GPU so far.

Weights start as those of the local layers do, to the bit. The feed-forward part has Transformer Engine's GELU, which is
the tanh approximation; the local one is exact.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt.blocks import RotaryEmbedding


@dataclass(frozen=True)
class Fp8:
    """How to compute in FP8.

    recipe  an object of ``transformer_engine.common.recipe``
    group   the ranks that hold the same weights, over which the largest values are reduced; None for this rank alone
    """

    recipe: Any
    group: Any = None


class TransformerEngineBlock(nn.Module):
    """One pre-norm transformer layer, as ``blocks.Block``, from four fused modules.

    Under FP8 ``is_first_microbatch`` is passed on to them: FP8 copies of the weights are made in a step's first
    microbatch and kept for the others. ``GPTStage.set_is_first_microbatch`` sets it, the first forward clears it.

    Args:
        te: the module ``transformer_engine.pytorch``.
        config: sizes, under Megatron's field names.
        layer: number of the layer, 0-based, in the whole model.
        device: where its parameters are allocated.
        delay_weight_grad: leave weight gradients to ``backward_dw()``.
        fp8: whether it runs inside of an FP8 region.
    """

    def __init__(
        self, te: Any, config: Any, layer: int, device: torch.device, delay_weight_grad: bool, fp8: bool
    ) -> None:
        super().__init__()
        hidden, self.num_heads = config.hidden_size, config.num_attention_heads
        common: dict[str, Any] = {"bias": False, "params_dtype": torch.float32, "device": device}
        if delay_weight_grad:  # older releases do not know the keyword
            common["delay_wgrad_compute"] = True
        self.qkv = te.LayerNormLinear(hidden, 3 * hidden, eps=config.layernorm_epsilon, **common)
        self.core_attention = te.DotProductAttention(
            self.num_heads,
            hidden // self.num_heads,
            attention_dropout=config.attention_dropout,
            qkv_format="sbhd",
            attn_mask_type="causal",
            layer_number=layer + 1,
        )
        self.proj = te.Linear(hidden, hidden, **common)
        self.feed_forward = te.LayerNormMLP(
            hidden, config.ffn_hidden_size, eps=config.layernorm_epsilon, activation="gelu", **common
        )
        self.hidden_dropout = config.hidden_dropout
        self.fp8 = fp8
        self.is_first_microbatch = True

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """``[s, b, h]`` to ``[s, b, h]``, same dtype."""
        # None: nothing is kept between microbatches.
        first = self.is_first_microbatch if self.fp8 else None
        x = x + self._dropped(self._attention(x, rotary, first)).to(x.dtype)
        x = x + self._dropped(self.feed_forward(x, is_first_microbatch=first)).to(x.dtype)
        self.is_first_microbatch = False
        return x

    def _attention(self, x: Tensor, rotary: RotaryEmbedding, first: bool | None) -> Tensor:
        s, b, h = x.shape
        qkv = self.qkv(x, is_first_microbatch=first).view(s, b, 3, self.num_heads, h // self.num_heads)
        query, key, value = qkv.unbind(2)  # each [s, b, heads, head_dim]
        context = self.core_attention(_rotated(query, rotary), _rotated(key, rotary), value.contiguous())
        return self.proj(context.reshape(s, b, h), is_first_microbatch=first)

    def _dropped(self, branch: Tensor) -> Tensor:
        if self.hidden_dropout == 0.0:
            return branch
        return F.dropout(branch, self.hidden_dropout, self.training)


class TransformerEngineParts:
    """``parts.LayerParts`` from Transformer Engine. Arguments: TransformerEngineBlock; ``fp8`` None for none."""

    def __init__(self, te: Any, device: torch.device, delay_weight_grad: bool = False, fp8: Fp8 | None = None) -> None:
        self.te = te
        self.device = device
        self.delay_weight_grad = delay_weight_grad
        self.fp8 = fp8

    def block(self, config: Any, layer: int) -> nn.Module:
        return TransformerEngineBlock(
            self.te, config, layer, self.device, self.delay_weight_grad, fp8=self.fp8 is not None
        )

    def norm(self, hidden_size: int, epsilon: float) -> nn.Module:
        return self.te.LayerNorm(hidden_size, eps=epsilon)

    def forward_context(self) -> AbstractContextManager[Any]:
        """One FP8 region a microbatch: the largest values are reduced where it ends."""
        if self.fp8 is None:
            return nullcontext()
        if hasattr(self.te, "autocast"):  # the name since 2.9
            return self.te.autocast(enabled=True, recipe=self.fp8.recipe, amax_reduction_group=self.fp8.group)
        return self.te.fp8_autocast(enabled=True, fp8_recipe=self.fp8.recipe, fp8_group=self.fp8.group)

    def checkpointed(self, block: nn.Module, hidden: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """torch's own checkpointing would compute again with another FP8 scale."""
        output: Tensor = self.te.checkpoint(block, hidden, rotary, use_reentrant=False)
        return output


def _rotated(x: Tensor, rotary: RotaryEmbedding) -> Tensor:
    """``[s, b, heads, head_dim]``, rotated, contiguous."""
    return rotary(x.permute(1, 2, 0, 3)).permute(2, 0, 1, 3).contiguous()
