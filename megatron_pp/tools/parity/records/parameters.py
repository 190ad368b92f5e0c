"""Parameters by their names in the whole model: their made-up values, and the part of a parameter that a rank has."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_pp.common.module_attributes import unwrapped

Indices = dict[int, np.ndarray]
"""Dimension -> the positions in the whole tensor that this rank has. A dimension that is not named is whole."""


@dataclass(frozen=True)
class Place:
    """This rank's number in each group of Megatron-core's parallel state, and the sizes of the groups."""

    rank: dict[str, int]
    size: dict[str, int]

    @staticmethod
    def here() -> Place:
        from megatron.core import parallel_state as state

        names = {
            "TP": "tensor_model_parallel",
            "PP": "pipeline_model_parallel",
            "CP": "context_parallel",
            "DP": "data_parallel",
            "EP": "expert_model_parallel",
            "ETP": "expert_tensor_parallel",
        }
        return Place(
            {name: getattr(state, f"get_{own}_rank")() for name, own in names.items()},
            {name: getattr(state, f"get_{own}_world_size")() for name, own in names.items()},
        )


def global_name(path: str, modules: dict[str, Any], place: Place) -> str:
    """The name in the whole model of a path within a model chunk. Layers and experts are numbered from 0."""

    def layer(found: re.Match[str]) -> str:
        number = getattr(modules.get(path[: found.end()]), "layer_number", None)
        return found[0] if number is None else f"layers.{number - 1}"

    def expert(found: re.Match[str]) -> str:
        here = len(modules[path[: found.end()].rpartition(".")[0]])
        return f"local_experts.{int(found[1]) + here * place.rank['EP']}"

    parts = []
    end = 0
    for found in re.finditer(r"\blayers\.\d+|\blocal_experts\.(\d+)", path):
        parts += [path[end : found.start()], layer(found) if found[1] is None else expert(found)]
        end = found.end()
    return "".join([*parts, path[end:]])


def named_parameters(chunk: Any, place: Place) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name in the whole model, parameter) of each parameter. An output layer that is tied to the embedding has the
    embedding's name, unless its stage also has a copy of the embedding for multi-token prediction.
    """
    model = unwrapped(chunk)
    modules = dict(model.named_modules())
    for path, parameter in model.named_parameters():
        name = global_name(path, modules, place)
        if name == "output_layer.weight" and getattr(model, "share_embeddings_and_output_weights", False):
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def made_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values for the whole parameter, which depend on its name. Zeros and ones, as Megatron initialises some
    parameters, would hide faults. Outputs have unit size, so that every branch of the model counts.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    noise = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    if len(shape) > 1:
        return noise / np.float32(shape[-1] ** 0.5)
    return np.float32("norm" in name and name.endswith("weight")) + np.float32(0.2) * noise


def indices_of(
    name: str,
    local: tuple[int, ...],
    whole: tuple[int, ...],
    gated: bool,
    place: Place,
    sizes: Sequence[int] | None = None,
) -> Indices:
    """The part of the whole parameter that this rank has, from both shapes. ``sizes`` are the sizes of parts of its
    first dimension on this rank; each part is divided among ranks separately. Raises ValueError if the shapes do not
    fit."""
    kind = "ETP" if ".experts." in name else "TP"
    if len(local) != len(whole):
        raise ValueError(f"{name}: of shape {local} here and {whole} in one process")
    indices = {}
    for dim, (here, there) in enumerate(zip(local, whole, strict=True)):
        if here == there:
            continue
        if here * place.size[kind] != there:
            raise ValueError(f"{name}: of shape {local} here and {whole} in one process, {kind} {place.size[kind]}")
        if dim == 0 and sizes is not None and sum(sizes) == here:
            indices[dim] = _of_each_part(sizes, place.rank[kind], place.size[kind])
            continue
        halves = 2 if gated and dim == 0 and "linear_fc1" in name else 1
        parts = np.arange(there).reshape(halves, place.size[kind], -1)
        indices[dim] = parts[:, place.rank[kind]].reshape(-1)
    return indices


def _of_each_part(sizes: Sequence[int], rank: int, ranks: int) -> np.ndarray:
    begins = np.cumsum([0, *(size * ranks for size in sizes[:-1])])
    return np.concatenate([begin + rank * size + np.arange(size) for begin, size in zip(begins, sizes, strict=True)])


def part_of(whole: np.ndarray, indices: Indices) -> np.ndarray:
    for dim, positions in indices.items():
        whole = whole.take(positions, axis=dim)
    return whole


def own_range(chunk: Any, parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """The range of the flat gradient that this rank has after a reduce-scatter; None if it has the whole gradient."""
    for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
        if parameter not in getattr(buffer, "param_index_map", {}):
            continue
        if not buffer.ddp_config.use_distributed_optimizer:
            return None
        first, last, number = buffer.param_index_map[parameter][:3]
        bucket = buffer.buckets[number]
        group = buffer.data_parallel_group
        length = bucket.grad_data.numel() // group.size()
        begin = bucket.offset + group.rank() * length
        return max(first, begin) - first, max(0, min(last, begin + length) - first)
    return None
