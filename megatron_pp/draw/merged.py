"""Level of detail: blocks thinner than a pixel are added up per pixel, too many steps of memory are thinned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from megatron_pp.plan.sim.simulation import Event


class Piece(NamedTuple):
    """From ``left`` to ``right`` (pixels): one block, or the shares of operations in one pixel."""

    left: float
    right: float
    event: Event | None
    shares: tuple[tuple[str, float], ...] = ()


def pieces(events: Sequence[Event], pixels_per_unit: float) -> Iterator[Piece]:
    """Blocks of at least a pixel; the others as one piece per pixel, with the share of each operation."""
    blocks = ((e, e.start * pixels_per_unit, e.end * pixels_per_unit) for e in events)
    for pixel, group in groupby(blocks, lambda block: int(block[1]) if block[2] - block[1] < 1.0 else None):
        if pixel is None:
            yield from (Piece(left, right, event) for event, left, right in group)
            continue
        shares: defaultdict[str, float] = defaultdict(float)
        for event, left, right in group:
            shares[event.instruction.op] = shares[event.instruction.op] + right - left
        yield Piece(pixel, pixel + 1, None, tuple(shares.items()))


def thinned(steps: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about ``most`` of the steps: the highest and the last of each stretch of time."""
    if len(steps) <= most:
        return list(steps)
    stretch = steps[-1][0] / (most / 2) or 1.0
    kept: list[tuple[float, float]] = []
    for _, members in groupby(steps, key=lambda step: int(step[0] / stretch)):
        group = list(members)
        highest = max(group, key=lambda step: step[1])
        kept += [highest] if highest is group[-1] else [highest, group[-1]]
    return kept
