"""The parts of a GPT stage: rotary positions, causal attention, feed-forward, the pre-norm block.

All of them work on activations of shape ``[s, b, h]`` (sequence, microbatch, hidden), the layout that
Megatron sends between pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10000.0

NormFactory = Callable[[int, float], nn.Module]  # (hidden size, epsilon) -> a norm with weight and bias


def layer_norm(hidden_size: int, epsilon: float) -> nn.Module:
    """torch's own."""
    return nn.LayerNorm(hidden_size, eps=epsilon)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., 2104.09864, section 3.2.2), the half-split form.

    Args:
        head_dim: size of one attention head; must be even.
        max_sequence_length: longest sequence that will be rotated.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_sequence_length: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(max_sequence_length, dtype=torch.float64)[:, None] * frequencies[None, :]
        # Never saved: every stage computes the same tables for itself.
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``x`` of shape ``[b, heads, s, head_dim]``; the result has its shape and dtype."""
        cos = self.cos[: x.shape[-2]].to(x.dtype)
        sin = self.sin[: x.shape[-2]].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention by the fused ``scaled_dot_product_attention``.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of heads; divides ``hidden_size``.
        dropout: probability of dropping an attention weight in training.
    """

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """``[s, b, h]`` to ``[s, b, h]``."""
        s, b, h = x.shape
        # [s, b, 3h] -> three times [b, heads, s, head_dim]
        qkv = self.qkv(x).view(s, b, 3, self.num_heads, h // self.num_heads)
        query, key, value = qkv.permute(2, 1, 3, 0, 4).unbind(0)
        context = F.scaled_dot_product_attention(
            rotary(query),
            rotary(key),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.proj(context.permute(2, 0, 1, 3).reshape(s, b, h))


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them.

    Args:
        hidden_size: width of the residual stream.
        ffn_hidden_size: width between the two maps.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` to ``[s, b, h]``."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One pre-norm transformer layer: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``.

    The residual stream keeps the dtype it came in, under autocast too: what is added to it is cast, so a
    stage sends the dtype that the next one expects.

    Args:
        hidden_size, ffn_hidden_size, num_heads: sizes.
        attention_dropout: probability of dropping an attention weight.
        hidden_dropout: probability of dropping an element of a branch before it joins the stream.
        norm_epsilon: added to the variance in layer normalisation.
        norm: makes the norms.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_heads: int,
        attention_dropout: float,
        hidden_dropout: float,
        norm_epsilon: float,
        norm: NormFactory = layer_norm,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(hidden_size, norm_epsilon)
        self.attention = CausalSelfAttention(hidden_size, num_heads, attention_dropout)
        self.feed_forward_norm = norm(hidden_size, norm_epsilon)
        self.feed_forward = FeedForward(hidden_size, ffn_hidden_size)
        self.hidden_dropout = hidden_dropout

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """``[s, b, h]`` to ``[s, b, h]``, same dtype."""
        x = x + self._dropped(self.attention(self.attention_norm(x), rotary)).to(x.dtype)
        return x + self._dropped(self.feed_forward(self.feed_forward_norm(x))).to(x.dtype)

    def _dropped(self, branch: Tensor) -> Tensor:
        if self.hidden_dropout == 0.0:
            return branch
        return F.dropout(branch, self.hidden_dropout, self.training)
