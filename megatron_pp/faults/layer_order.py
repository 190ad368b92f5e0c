"""Checks that the layers of all ranks follow each other, by the numbers of Megatron's layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_pp.faults.consistency import LAYERS, Mismatch
from megatron_pp.faults.store.records import Entry

_ONE_CHUNK = re.compile(r"layers (-?\d{1,9}) to (-?\d{1,9}) in chunk (\d{1,9}) \(stage (\d{1,9})\)")


class _Held(NamedTuple):
    """The layers of a model chunk, and the stage as which it runs."""

    stage: int
    chunk: int
    lowest: int
    highest: int
    rank: int

    def __str__(self) -> str:
        return f"layers {self.lowest} to {self.highest} in chunk {self.chunk} (stage {self.stage})"


def described(numbers: Mapping[int, Sequence[int]], stages: Sequence[int], rank: int) -> str:
    """The layers of ``rank`` as text for its entry: ``numbers`` of the layers by chunk, and the stage of each chunk."""
    held = [_Held(stages[chunk], chunk, min(found), max(found), rank) for chunk, found in numbers.items() if found]
    return "; ".join(map(str, held))


def find_mismatch(entries: Mapping[int, Entry], step: int) -> Mismatch | None:
    """Compare the layers of all ranks once all have published their entry for ``step``; every rank finds the same. A
    stage must have higher numbers than the stages before it. The model may choose the numbers."""
    held = []
    for rank, entry in entries.items():
        if entry.step == step:
            for found in _ONE_CHUNK.findall(entry.description.get(LAYERS, "")):
                lowest, highest, chunk, stage = map(int, found)
                held.append(_Held(stage, chunk, lowest, highest, rank))
    for before, here in pairwise(sorted(held)):
        if here.lowest <= before.highest:
            wanted = f"{here}, where numbers above {before.highest} belong: build each chunk for its stage"
            return Mismatch(LAYERS, {before.rank: str(before), here.rank: wanted})
    return None
