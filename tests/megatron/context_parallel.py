"""Context parallelism of Megatron-core on the CPU: each rank holds two of the 2 x CP pieces of a sequence.

Megatron's own attention for it needs Transformer Engine. `GatheredAttention` stands in for that; groups, rotary
embeddings, loss factors and gradient reduction are Megatron's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def positions_of(length: int, rank: int, size: int) -> torch.Tensor:
    """Positions, int64 (length / size,), that a rank holds: pieces rank and 2 x size - 1 - rank, as Megatron has it."""
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def of_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of (micro_batch, sequence)."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tensor
    return tensor[:, positions_of(tensor.shape[1], parallel_state.get_context_parallel_rank(), size)]


class GatheredAttention(torch.nn.Module):
    """Causal attention of this rank's queries to the keys and values of all ranks, gathered by Megatron's function."""

    def __init__(self, config: Any, *unused: Any, **also_unused: Any) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any, **also_unused: Any
    ) -> torch.Tensor:
        """All (sequence / CP, micro_batch, heads, channels); returns (sequence / CP, micro_batch, hidden)."""
        group = parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
        parts = [positions_of(len(key), rank, group.size()) for rank in range(group.size())]
        later = torch.cat(parts)[None, :] > parts[group.rank()][:, None]
        scores = torch.einsum("qbhc,kbhc->bhqk", query, key) * self.scale
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
        return torch.einsum("bhqk,kbhc->qbhc", weights, value).flatten(2)
