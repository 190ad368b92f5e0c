"""What a GPT stage is built from: torch's own layers, or those of a library that fuses them.

A stage asks its parts for blocks and norms, for what to run its forward in, and for activation checkpointing. The parts
of Transformer Engine are in ``transformer_engine_layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.gpt.blocks import Block, NormFactory, RotaryEmbedding, layer_norm


class LayerParts(Protocol):
    """What a stage asks for."""

    def block(self, config: Any, layer: int) -> nn.Module:
        """Layer number ``layer`` (0-based, in the whole model): called with ``(hidden [s, b, h], rotary)``."""
        ...

    def norm(self, hidden_size: int, epsilon: float) -> nn.Module:
        """A layer norm with ``weight`` and ``bias``."""
        ...

    def forward_context(self) -> AbstractContextManager[Any]:
        """Around the layers of one forward of the stage."""
        ...

    def checkpointed(self, block: nn.Module, hidden: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """``block(hidden, rotary)`` that keeps its input and computes the rest again in backward."""
        ...


class LocalParts:
    """torch's own layers; norms may be those of a library that fuses them."""

    def __init__(self, norm: NormFactory = layer_norm) -> None:
        self._norm: Callable[[int, float], nn.Module] = norm

    def block(self, config: Any, layer: int) -> nn.Module:
        return Block(
            config.hidden_size,
            config.ffn_hidden_size,
            config.num_attention_heads,
            config.attention_dropout,
            config.hidden_dropout,
            config.layernorm_epsilon,
            self._norm,
        )

    def norm(self, hidden_size: int, epsilon: float) -> nn.Module:
        return self._norm(hidden_size, epsilon)

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def checkpointed(self, block: nn.Module, hidden: Tensor, rotary: RotaryEmbedding) -> Tensor:
        output: Tensor = checkpoint(block, hidden, rotary, use_reentrant=False)
        return output
