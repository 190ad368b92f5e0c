"""The layers of a GPT stage in plain torch, and their initial weights. Activations have shape ``[s, b, h]``."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROTARY_BASE = 10000.0


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., 2104.09864, section 3.2.2), the half-split form; ``head_dim`` is even."""

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
    """Multi-head causal self-attention; ``dropout`` is the probability of dropping an attention weight."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """``[s, b, h]`` to ``[s, b, h]``."""
        s, b, h = x.shape
        # [s, b, 3h] -> three times [b, heads, s, head_dim]
        qkv = self.qkv(x).view(s, b, 3, self.num_heads, h // self.num_heads)
        query, key, value = qkv.permute(2, 1, 3, 0, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(rotary(query), rotary(key), value, dropout_p=dropout, is_causal=True)
        return self.proj(context.permute(2, 0, 1, 3).reshape(s, b, h))


def dropped(block: Any, branch: Tensor) -> Tensor:
    """A branch of ``block``, before it joins the residual stream."""
    return F.dropout(branch, block.hidden_dropout, block.training) if block.hidden_dropout else branch


class Block(nn.Module):
    """One pre-norm transformer layer: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, config: Any, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.layernorm_epsilon
        self.attention_norm = norm(hidden, eps=epsilon)
        self.attention = CausalSelfAttention(hidden, config.num_attention_heads, config.attention_dropout)
        self.feed_forward_norm = norm(hidden, eps=epsilon)
        up = nn.Linear(hidden, config.ffn_hidden_size, bias=False)
        down = nn.Linear(config.ffn_hidden_size, hidden, bias=False)
        self.feed_forward = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))
        self.hidden_dropout = config.hidden_dropout

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """``[s, b, h]`` to ``[s, b, h]``, same dtype: under autocast too a stage sends what the next one expects."""
        x = x + dropped(self, self.attention(self.attention_norm(x), rotary)).to(x.dtype)
        return x + dropped(self, self.feed_forward(self.feed_forward_norm(x))).to(x.dtype)


class LayerParts:
    """What a GPT stage is built from; ``norm`` is called with the hidden size and ``eps``.

    These parts are torch's own. Those of Transformer Engine (transformer_engine_layers.py) have the same methods.
    """

    def __init__(self, norm: Callable[..., nn.Module] = nn.LayerNorm) -> None:
        self.norm = norm

    def block(self, config: Any, layer: int) -> nn.Module:
        """Layer ``layer`` (0-based, in the whole model): called with ``(hidden [s, b, h], rotary)``."""
        return Block(config, self.norm)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Around the layers of one forward of the stage."""
        return nullcontext()

    def checkpointed(self, block: nn.Module, hidden: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """``block(hidden, rotary)`` that keeps its input and computes the rest again in backward."""
        output: Tensor = checkpoint(block, hidden, rotary, use_reentrant=False)
        return output


@torch.no_grad()
def initialize(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill ``weight`` in place with normal numbers of standard deviation ``std``, drawn in fp32 on the CPU."""
    weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float32) * std)


def generator_of(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the part of the model called ``name``: weights do not depend on how the model is cut.

    The seed goes through a hash, so that neighbouring seeds and neighbouring layers draw unrelated numbers.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initialize_block(block: nn.Module, seed: int, layer: int, num_layers: int, std: float) -> None:
    """Give layer ``layer`` (0-based, in the whole model) its initial weights.

    Matrices that write to the residual stream get ``std / sqrt(2 * num_layers)`` (GPT-2 report, section 2.3).
    """
    generator = generator_of(seed, f"layers.{layer}")
    for name, parameter in block.named_parameters():
        if parameter.dim() < 2:
            continue  # norms start as the identity
        writes_to_stream = name.endswith(("proj.weight", "down.weight", "fc2_weight"))
        initialize(parameter, std / math.sqrt(2 * num_layers) if writes_to_stream else std, generator)
