"""Vector clocks: the order of steps on the streams and hosts of all ranks.

A *timeline* is one order of execution: a stream of a rank's device, or its host. Its clock says for each timeline how
many steps of that timeline have happened before its own next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from testkit.streams.call_log import CallLog

Clock = dict[int, int]
"""Timeline number -> how many of its steps have happened before."""


def join(clock: Clock, other: Mapping[int, int]) -> None:
    """Add to ``clock`` that all steps of ``other`` have happened before."""
    for number, tick in other.items():
        if clock.get(number, 0) < tick:
            clock[number] = tick


class Timeline:
    """``number`` is unique among all ranks; ``name`` is for reports."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.clock: Clock = {number: 0}

    def advance(self) -> None:
        self.clock[self.number] += 1


class Transfer(Protocol):
    """A posted transfer. ``end``: the clock of the steps after it."""

    finished: bool
    end: Clock


class Host(Timeline):
    """The host of the device of ``rank``. ``steps`` counts the changes of its clock."""

    steps = 0

    def __init__(self, number: int, rank: int, log: CallLog) -> None:
        super().__init__(number, "host")
        self.rank = rank
        self.log = log
        self.before_command: Callable[[Lane], None] = lambda lane: None  # steps that it issues to a stream
        log.stream(rank, number, self.name, host=True)

    def work(self) -> None:
        """The host does an operation on its own memory."""
        self.advance()
        self.steps += 1

    def learn(self, clock: Mapping[int, int], event: int = 0) -> None:
        """The host has seen that the steps of ``clock`` are over, so all that it issues later comes after them.
        ``event``: the event's number in the log."""
        if event:
            self.log.wait(self.number, event)
        join(self.clock, clock)
        self.steps += 1

    def knows(self, clock: Mapping[int, int]) -> bool:
        return all(self.clock.get(number, 0) >= tick for number, tick in clock.items())


class Lane(Timeline):
    """A stream. ``pending``: transfers that must finish before the operations issued on it so far."""

    def __init__(self, number: int, name: str, host: Host) -> None:
        super().__init__(number, name)
        self.host = host
        self.pending: set[Transfer] = set()
        self._seen = -1
        host.log.stream(host.rank, number, name)

    def now(self) -> Clock:
        """The clock of the next operation that the host issues on this stream."""
        if self._seen != self.host.steps:
            self._seen = self.host.steps
            join(self.clock, self.host.clock)
        return self.clock

    def issue(self) -> None:
        self.host.before_command(self)
        self.now()
        self.advance()

    def record(self) -> int:
        """Record an event after all that was issued so far. Returns its number in the log."""
        return self.host.log.record(self.number)

    def wait_for(self, clock: Mapping[int, int], pending: Iterable[Transfer], event: int = 0) -> None:
        """Order all later operations after ``clock`` and ``pending``. ``event``: the event's number in the log."""
        if event:
            self.host.log.wait(self.number, event)
        join(self.clock, clock)
        self.pending |= {transfer for transfer in pending if not transfer.finished}
        self.host.before_command(self)

    def unfinished(self) -> set[Transfer]:
        self.pending = {transfer for transfer in self.pending if not transfer.finished}
        return self.pending

    def wait_for_lane(self, other: Lane) -> None:
        self.wait_for(other.now(), other.unfinished(), other.record())
