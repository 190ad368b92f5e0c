"""The loop that advances ranks in time. Lowering's clock, orders, ``verify`` and the simulator use it; each says what a
rank does in its turn.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Generic, TypeVar

What = TypeVar("What")


class Agenda(Generic[What]):
    """Planned events, in any unit of time. Of two events at one time, the one that was planned first happens first."""

    def __init__(self, first: Iterable[What] = ()) -> None:
        self._due: list[tuple[float, int, What]] = []
        self._planned = 0
        for what in first:
            self.plan(what, 0)

    def plan(self, what: What, when: float) -> None:
        self._planned += 1
        heappush(self._due, (when, self._planned, what))

    def run(self, happen: Callable[[What, float], object]) -> None:
        """Call ``happen(what, when)`` for each planned event, also those that such calls plan, until none is left."""
        due = self._due
        while due:
            when, _, what = heappop(due)
            happen(what, when)
