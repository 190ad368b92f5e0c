"""What one rank knows about the others of its pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_pp.faults.records import Entry, Progress

if TYPE_CHECKING:
    from megatron_pp.faults.failures import Failure


@dataclass
class Peer:
    """The newest progress record of one rank. Times in seconds of this rank's monotonic clock."""

    progress: Progress
    beat_at: float  # when its beat was first seen
    moved_at: float  # when its position last changed
    reads_since: int = 0  # how often it was read since with the same beat

    def update(self, progress: Progress, now: float) -> None:
        if progress.beat == self.progress.beat:
            self.reads_since += 1
            return
        self.progress = progress
        self.beat_at = now
        self.moved_at = now - progress.idle  # its own clock measured idle; clocks of machines are not compared
        self.reads_since = 0


@dataclass
class Peers:
    """What one rank of a pipeline knows about the others."""

    failure: Failure | None = None
    seen: dict[int, Peer] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    stopped: dict[int, tuple[float, float]] = field(default_factory=dict)  # rank -> its first and its last look
    reading_since: float | None = None  # since when peers are polled without a break; None while there is no need to
    read_at: float = 0.0  # when they were last read
    broken_since: float | None = None  # since when the store returns errors; None while it answers
    broken: str = ""  # that error
    asked_at: float | None = None  # when the store was asked what it has not answered yet
    checked_at: float = 0.0  # when the store was asked for failures, the last time that it answered
    have_read: set[int] = field(default_factory=set)  # ranks that have read the failure, where there is one
    connected: bool = True  # whether this rank has had a connection to the store of its own

    def note_progress(self, records: Mapping[int, Progress], now: float) -> None:
        """Take in the records of the other ranks, read at ``now``."""
        self.read_at = now
        if self.reading_since is None:
            self.reading_since = now
        for rank, progress in records.items():
            if rank in self.seen:
                self.seen[rank].update(progress, now)
            else:
                self.seen[rank] = Peer(progress, now, now - progress.idle)

    def stop_reading(self) -> None:
        """Forget what was read: it gets old from now on."""
        self.reading_since = None
        self.seen.clear()
