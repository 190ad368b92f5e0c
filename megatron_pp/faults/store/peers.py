"""What one rank knows about the others of its pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_pp.faults.store.records import Entry, Progress

if TYPE_CHECKING:
    from megatron_pp.faults.store.failures import Failure


@dataclass
class Peer:
    """The newest progress record of one rank. Times in seconds of this rank's monotonic clock."""

    progress: Progress
    beat_at: float  # when its beat was first seen
    moved_at: float  # when its position last changed
    reads_since: int = 0  # number of reads since then with the same beat

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
    reading_since: float | None = None  # start of the current polling of peers; None while there is no need to poll
    read_at: float = 0.0  # when they were last read
    broken_since: float | None = None  # first error of the store; None while it answers
    broken: str = ""  # the store's error
    asked_at: float | None = None  # time of a question to the store that it has not answered yet
    checked_at: float = 0.0  # time of the last question about failures that the store has answered
    have_read: set[int] = field(default_factory=set)  # ranks that have read the failure, if there is one
    connected: bool = True  # whether this rank has had a connection to the store of its own

    def note_progress(self, records: Mapping[int, Progress], now: float) -> None:
        """Note the records of the other ranks, which were read at ``now``."""
        self.read_at = now
        if self.reading_since is None:
            self.reading_since = now
        for rank, progress in records.items():
            if rank in self.seen:
                self.seen[rank].update(progress, now)
            else:
                self.seen[rank] = Peer(progress, now, now - progress.idle)

    def stop_reading(self) -> None:
        """Forget the records, which are no longer renewed."""
        self.reading_since = None
        self.seen.clear()
