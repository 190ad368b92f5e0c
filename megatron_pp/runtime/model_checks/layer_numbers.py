"""The numbers of Megatron's layers in the model chunks of a rank, which must grow from stage to stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_pp.common.module_attributes import unwrapped
from megatron_pp.faults import layer_order


def wrong_chunks(chunks: Sequence[Any], stages: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The number of each chunk whose layers do not come after those of the rank's stage before it, and why."""
    most = 0
    for number in sorted(range(len(chunks)), key=lambda chunk: stages[chunk]):
        layers = _layer_numbers(chunks[number])
        if layers and min(layers) <= most:
            yield number, f"its layers are {layers}, and an earlier stage of this rank has layer {most}"
        most = max([most, *layers])


def described(chunks: Sequence[Any], stages: Sequence[int], rank: int) -> str:
    """All layer numbers as text, for the ranks to compare (``faults/layer_order.py``); "" if there are none."""
    return layer_order.described(dict(enumerate(map(_layer_numbers, chunks))), stages, rank)


def _layer_numbers(chunk: Any) -> list[int]:
    layers = getattr(getattr(unwrapped(chunk), "decoder", None), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return []
    numbers = [getattr(layer, "layer_number", None) for layer in layers]
    return [number for number in numbers if type(number) is int]
