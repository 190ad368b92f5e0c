"""Sequences in the order in which they arrive: draws lengths from public traces, and keeps microbatches in the order of
their first sequences."""

from __future__ import annotations

import csv
import random
from pathlib import Path

from megatron_pp.features.packing.packing import PackedStep

LENGTHS = Path(__file__).with_name("sequence_lengths.csv")


def sequence_lengths(trace: str, count: int, seed: int) -> list[int]:
    """``count`` lengths, drawn from the trace's histogram. All lengths of a bucket are equally likely."""
    with LENGTHS.open(encoding="utf-8", newline="") as lines:
        buckets = [row for row in csv.DictReader(line for line in lines if line[0] != "#") if row["trace"] == trace]
    chance = random.Random(seed)
    drawn = chance.choices(buckets, [int(row["sequences"]) for row in buckets], k=count)
    return [chance.randint(int(row["tokens from"]), int(row["tokens to"])) for row in drawn]


def as_it_arrives(step: PackedStep) -> PackedStep:
    """``step``, with its microbatches in the order of their first sequences."""
    arrival = [min(place for pack in slot.packs for place in pack.sequences) for slot in step.slots]
    return step.ordered(sorted(range(len(arrival)), key=arrival.__getitem__))
