"""Multi-latent attention on the CPU, built as with Transformer Engine. Part of the CPU stand-in.

Megatron's plain layers build it differently, and two of their gradients are wrong under tensor parallelism
(`known_faults.toml`: the shared rotary key under sequence parallelism, the norm of queries without it). The comparison
of a job with Transformer Engine must not show these faults, but must show the fault that both implementations have.

| of the attention                  | plain layers              | Transformer Engine, and here            |
| --------------------------------- | ------------------------- | --------------------------------------- |
| down-projections to both latents  | column-parallel, gathered | whole on each tensor-parallel rank      |
| norms of both latents             | layers of the attention   | parameters of the up-projections        |
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from megatron_pp.tools.parity.cpu.wrapping import wrap

_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")
_NORMS = {"q_layernorm": "linear_q_up_proj", "kv_layernorm": "linear_kv_up_proj"}


class Alone:
    """A tensor-parallel group that has only this rank. Megatron's layers send nothing in it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def complete_latent_attention() -> None:
    """Changes how Megatron builds multi-latent attention. Call it once; existing layers do not change."""
    from megatron.core.transformer import multi_latent_attention

    vars(multi_latent_attention)["TELinear"] = duplicated_linear()  # the attention checks its layers for this class
    wrap(multi_latent_attention.MLASelfAttention, "__init__", _built_as_with_transformer_engine)


@functools.cache
def duplicated_linear() -> Any:
    """The class that replaces `TELinear` with `parallel_mode="duplicated"`. It is Megatron's plain layer in a group of
    one rank, so that its weight gradient can be split like that of other layers."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class DuplicatedLinear(ColumnParallelLinear):
        def __init__(self, *args: Any, parallel_mode: str, tp_group: Any = None, **kwargs: Any) -> None:
            assert parallel_mode == "duplicated", parallel_mode
            config = kwargs["config"]
            init = kwargs["init_method"]
            super().__init__(*args, gather_output=False, tp_group=Alone(), **kwargs)
            self.weight.tensor_model_parallel = False
            self.weight.sequence_parallel = config.sequence_parallel
            tracker = random.get_cuda_rng_tracker()
            if config.perform_initialization and tracker.is_initialized():  # equal on all tensor-parallel ranks
                with tracker.fork(random.get_data_parallel_rng_tracker_name()), torch.no_grad():
                    init(self.weight)

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            groups: dict[str, Any] = {}
            if "dp_cp_group" in (metadata or {}):  # newer releases need the groups
                tp_group = parallel_state.get_tensor_model_parallel_group()
                groups = {"tp_group": tp_group, "dp_cp_group": metadata["dp_cp_group"]}
            values = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(values, prefix, None, sharded_offsets, **groups)

    return DuplicatedLinear


def _built_as_with_transformer_engine(
    original: Any, self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
) -> None:
    own = dataclasses.replace(submodules, **dict.fromkeys(_DOWN, duplicated_linear()))
    original(self, config, own, *args, **kwargs)
    if getattr(config, "experimental_attention_variant", None) != "dsa":  # sparse attention needs separate norms
        for name, projection in _NORMS.items():
            _hand_over(self, name, getattr(self, projection, None))


def _hand_over(attention: Any, name: str, projection: Any) -> None:
    """Makes the norm a submodule of the projection, so that its parameters have the projection's name. The attention
    still calls it."""
    norm = attention._modules.get(name)
    if projection is not None and norm is not None and any(True for _ in norm.parameters()):
        projection.layer_norm = attention._modules.pop(name)
        attention.__dict__[name] = norm
