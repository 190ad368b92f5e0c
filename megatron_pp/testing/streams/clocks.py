"""Vector clocks: what has happened before what, on the streams and hosts of all ranks.

A *timeline* is one order of execution: a stream of a rank's device, or its host. Its clock holds, per timeline, how
much of that one has happened before what it does next.
"""

from __future__ import annotations

from collections.abc import Mapping

Clock = dict[int, int]
"""Timeline number -> how many of its steps have happened before."""


def join(clock: Clock, other: Mapping[int, int]) -> None:
    """From now on all that ``other`` knows has happened before, too."""
    for number, tick in other.items():
        if clock.get(number, 0) < tick:
            clock[number] = tick


class Timeline:
    """``number`` is unique among all ranks; ``name`` is for reports."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.clock: Clock = {number: 0}

    def advance(self) -> int:
        """One more step; returns its number."""
        tick = self.clock[self.number] + 1
        self.clock[self.number] = tick
        return tick
