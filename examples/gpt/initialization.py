"""Initial weights that do not depend on how the model is cut.

Every layer draws its weights from a generator of its own, seeded by the run's seed and the layer's number in the whole
model, on the CPU. So a stage holds, to the bit, the weights that the same layers have in a single-process model.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn


def layer_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the part of the model called ``name`` (``"embedding"``, ``"layers.3"``, ...).

    The seed goes through a hash, so that neighbouring seeds and neighbouring layers draw unrelated numbers.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialize_matrix(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Fill ``weight`` in place with normal numbers of standard deviation ``std``, drawn in fp32 on the CPU."""
    weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float32) * std)


def initialize_block(block: nn.Module, seed: int, layer: int, num_layers: int, std: float) -> None:
    """Give layer number ``layer`` (0-based, in the whole model) its initial weights.

    Matrices that write to the residual stream get ``std / sqrt(2 * num_layers)``, so that the variance of the stream
    does not grow with depth (GPT-2 report, section 2.3).
    """
    generator = layer_generator(seed, f"layers.{layer}")
    for name, parameter in block.named_parameters():
        if parameter.dim() < 2:
            continue  # norms start as the identity, as nn.LayerNorm makes them
        writes_to_stream = name.endswith(("proj.weight", "down.weight", "fc2_weight"))
        initialize_matrix(parameter, std / math.sqrt(2 * num_layers) if writes_to_stream else std, generator)
