"""Completes layers of Megatron-core for the CPU, whose plain implementations do not support a parallel dimension.

Transformer Engine's layers support it, but need a GPU. The other code is Megatron's own: Megatron reduces the norms'
gradients in the same place as those of Transformer Engine, and attention is Megatron's `DotProductAttention`.

| layer                | what it lacks         | what it does here                                        |
| -------------------- | --------------------- | -------------------------------------------------------- |
| `WrappedTorchNorm`   | sequence parallelism  | its parameters have the attribute `sequence_parallel`    |
| `DotProductAttention`| context parallelism   | keys and values of all ranks are gathered and put in order |
|                      | values of other sizes | the widths that multi-latent attention gives are taken   |
| `ColumnParallelLinear` | layers beside the output layer's where embedding gradients are deferred | theirs are not    |
| `MLASelfAttention`   | Transformer Engine's structure | see `latent_layers`                             |
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch

from megatron_pp.tools.parity.cpu.latent_layers import complete_latent_attention
from megatron_pp.tools.parity.cpu.wrapping import wrap


def complete_layers() -> None:
    """Makes the local layers run under sequence and context parallelism. It may be called several times."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import dot_product_attention, torch_norm

    norm: Any = torch_norm.WrappedTorchNorm
    if not getattr(norm, "_sequence_parallel", False):
        norm._sequence_parallel = True
        wrap(norm, "__new__", _with_marked_parameters)
        wrap(dot_product_attention.DotProductAttention, "__init__", _with_context_parallelism)
        wrap(dot_product_attention.DotProductAttention, "forward", _of_gathered_keys)
        wrap(layers.ColumnParallelLinear, "__init__", _with_its_own_gradients)
        complete_latent_attention()
    _name_berts_layers()


def _name_berts_layers() -> None:
    """Adds a name that Megatron's pretrain_bert.py imports. Its module lacks the name without Transformer Engine."""
    with contextlib.suppress(ImportError):
        from megatron.core.models.bert import bert_layer_specs as specs

        vars(specs).setdefault("bert_layer_with_transformer_engine_spec", specs.bert_layer_local_spec)


def positions_of(length: int, rank: int, size: int) -> torch.Tensor:
    """The positions of a context-parallel rank, int64 of shape (length / size,): the pieces rank and 2 x size - 1 -
    rank, as in Megatron."""
    if size == 1:
        return torch.arange(length)
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def _without(config: Any, **fields: Any) -> Any:
    changed = copy.copy(config)
    vars(changed).update(fields)
    return changed


def _with_marked_parameters(original: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    norm = original(cls, _without(config, sequence_parallel=False), *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _with_context_parallelism(
    original: Any, self: Any, config: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any
) -> None:
    original(self, _without(config, context_parallel_size=1), *args, **kwargs)
    self.config = config
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _with_its_own_gradients(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self.embedding_activation_buffer is None:
        self.config = _without(self.config, defer_embedding_wgrad_compute=False)


def _of_gathered_keys(
    original: Any, self: Any, query: Any, key: Any, value: Any, mask: Any = None, *args: Any, **kw: Any
) -> torch.Tensor:
    if self.config.context_parallel_size == 1:
        return original(self, query, key, value, mask, *args, **kw)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    group = getattr(self.pg_collection, "cp", None) if hasattr(self, "pg_collection") else None
    group = group or parallel_state.get_context_parallel_group()
    key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
    parts = [positions_of(len(key), rank, group.size()) for rank in range(group.size())]
    order = torch.cat(parts).argsort().to(key.device)
    if mask is None or mask.shape[-2:] != (len(query), len(key)):
        mask = (torch.arange(len(key))[None, :] > parts[group.rank()][:, None])[None, None].to(key.device)
    return original(self, query, key[order], value[order], mask, *args, **kw)
