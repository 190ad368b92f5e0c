"""Blocks of device memory. They record reads and writes of bytes, and find accesses that have no order.

A block outlives its owners. Memory that was freed and given to another tensor keeps its history, so that accesses by
the new owner are compared with those of the old one.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from testkit.streams.timelines import Clock, Timeline

READ, WRITE, FREE = "read", "write", "free"


class Access(NamedTuple):
    """One step of a timeline that uses a block.

    kind         READ, WRITE or FREE
    what         the operation: its name in ATen, or ``send to rank 1``
    instruction  the engine's instruction as text; empty outside of a step
    tick         step number of ``timeline``
    owner        number of the tensor that has the block, counted from its first one
    """

    kind: str
    what: str
    rank: int
    instruction: str
    timeline: Timeline
    tick: int
    owner: int

    def __str__(self) -> str:
        where = f" in {self.instruction}" if self.instruction else ""
        return f"{self.kind} by {self.what}{where} (rank {self.rank}, {self.timeline.name})"

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.timeline.number, 0) >= self.tick


class StreamRace(NamedTuple):
    """Two accesses to the same bytes, at least one of them a write, without an order by a stream, event or host.

    freed   the free of the memory between the two accesses, if there was one; then ``second`` is a reuse
    nbytes  size of the block
    """

    first: Access
    second: Access
    freed: Access | None
    nbytes: int

    @property
    def kind(self) -> str:
        """``read/write``, ``write/read``, ``write/write``, or ``read/reuse``, ``write/reuse``."""
        return f"{self.first.kind}/{self.second.kind if self.freed is None else 'reuse'}"

    def __str__(self) -> str:
        reuse = "" if self.freed is None else f"; in between, {self.freed}, so that the second had the memory reused"
        return f"{self.kind} race over {self.nbytes} bytes: {self.first}; then, not ordered, {self.second}{reuse}"


class Overwritten(NamedTuple):
    """A tensor in the memory of CUDA graphs is read after another tensor was written there. Graphs that share a pool
    were replayed in another order than that of their capture."""

    write: Access
    read: Access

    def __str__(self) -> str:
        return f"{self.read}, of what is overwritten by then: {self.write}, of another graph with the same memory"


@dataclass
class _Span:
    """The last accesses to bytes ``start`` to ``stop``."""

    start: int
    stop: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)  # by timeline

    def accesses(self) -> list[Access]:
        return [*([] if self.write is None else [self.write]), *self.reads.values()]


class Block:
    """Memory of ``nbytes`` that was allocated on stream ``home``."""

    def __init__(self, number: int, nbytes: int, home: Timeline, pool: "CachingAllocator | None" = None) -> None:
        self.number = number
        self.nbytes = nbytes
        self.home = home
        self.pool = pool
        self.owner = 0
        self.content: Access | None = None  # for memory of graphs: the last write
        self.freed: Access | None = None  # the last time
        self.recorded: set[Timeline] = set()  # streams named by record_stream
        # Whether another timeline than ``home`` has used it since all its accesses were last in order.
        self.is_shared = False
        self._spans: list[_Span] = []

    @property
    def of_graphs(self) -> bool:
        return self.pool is not None and self.pool.of_graphs

    def unordered(self, clock: Clock) -> list[Access]:
        """The recorded accesses that have not happened before ``clock``."""
        if not self.is_shared:
            return []
        return [a for span in self._spans for a in span.accesses() if not a.is_before(clock)]

    def use(self, access: Access, start: int, stop: int, clock: Clock) -> list[StreamRace]:
        """Record ``access`` to the bytes ``start`` to ``stop``, by a timeline with clock ``clock``. Returns its
        races."""
        races: list[StreamRace] = []
        kept: list[_Span] = []
        same: _Span | None = None
        writes = access.kind == WRITE
        for span in self._spans:
            if span.start < stop and start < span.stop:
                if span.write is not None and not span.write.is_before(clock):
                    races.append(self._race(span.write, access))
                if writes:
                    races += [self._race(one, access) for one in span.reads.values() if not one.is_before(clock)]
                if writes and start <= span.start and span.stop <= stop:
                    continue  # later accesses are compared with this write
            if span.start == start and span.stop == stop:
                same = span
            kept.append(span)
        if same is None:
            same = _Span(start, stop)
            kept.append(same)
        if writes:
            same.write = access
        else:
            same.reads[access.timeline.number] = access
        self._spans = kept
        self.is_shared = self.is_shared or access.timeline is not self.home
        return races

    def follow(self, access: Access) -> Overwritten | None:
        """For memory of graphs, whose tensors have it again at each replay: the other tensor that ``access`` finds
        there, or None."""
        if access.kind == WRITE:
            self.content = access
        elif self.content is not None and self.content.owner != access.owner:
            return Overwritten(self.content, access)
        return None

    def _race(self, first: Access, second: Access) -> StreamRace:
        return StreamRace(first, second, self.freed if first.owner != second.owner else None, self.nbytes)


class Use(NamedTuple):
    """A use of the bytes ``start`` to ``stop`` of a block, by its ``owner``-th tensor."""

    block: Block
    owner: int
    kind: str
    start: int
    stop: int


_UNIT = 512  # bytes to which sizes are rounded up


def _rounded(nbytes: int) -> int:
    return _UNIT * max(1, math.ceil(nbytes / _UNIT))


class CachingAllocator:
    """The memory of one device: a stream-ordered caching allocator like PyTorch's. The blocks of a stream's pool are in
    the order in which they were freed.

    Freed memory returns at once to the pool of the stream on which it was allocated, even if this and other streams
    have not finished their work on it. A later allocation on that stream gets it without waiting. ``record_stream`` is
    the exception: the block returns when the allocator finds, at an allocation, that the work of the named streams is
    done. Among the blocks that PyTorch's allocator might give (it splits larger ones), this allocator gives the most
    dangerous one.

    ``of_graphs``: whether it is a pool of CUDA graphs, whose replays always use the addresses of the capture.
    ``limit``: bytes of the device; 0: unlimited."""

    def __init__(self, of_graphs: bool = False, limit: int = 0) -> None:
        self.of_graphs = of_graphs
        self.limit = limit
        self.reserved = 0  # bytes of all blocks, in use and cached
        self.reused = 0
        self._pools: defaultdict[Timeline, list[Block]] = defaultdict(list)
        # Freed blocks that wait for streams named by record_stream, with a function that says whether their work at
        # that time is done.
        self._returning: list[tuple[Block, Callable[[], bool]]] = []
        self._made = 0

    def allocate(self, nbytes: int, stream: Timeline, clock: Callable[[], Clock]) -> Block:
        """A block for ``nbytes`` on ``stream``. ``clock()``: the clock of the stream's next step."""
        self._process_returning()
        size = _rounded(nbytes)
        pool = self._pools[stream]
        fitting = [block for block in pool if block.nbytes >= size]
        if not fitting:
            self._made += 1
            self.reserved += size
            return Block(self._made, size, stream, self)
        now = clock()
        chosen = next((block for block in fitting if block.unordered(now)), None)
        if chosen is None:
            chosen = min(fitting, key=lambda block: (block.nbytes, block.number))
            chosen.is_shared = False  # all accesses to it have happened before
        pool.remove(chosen)
        self.reused += 1
        chosen.owner += 1
        chosen.recorded.clear()
        return chosen

    def has_room(self, nbytes: int, stream: Timeline) -> bool:
        """Whether a cached block or new memory serves an allocation."""
        if not self.limit:
            return True
        self._process_returning()
        size = _rounded(nbytes)
        return self.reserved + size <= self.limit or any(block.nbytes >= size for block in self._pools[stream])

    def events_are_over(self) -> bool:
        """Whether the work is done for which freed blocks wait because of record_stream."""
        self._process_returning()
        return not self._returning

    def has_cached_blocks(self) -> bool:
        return any(self._pools.values())

    def drop_cached_blocks(self) -> None:
        """Return the memory of cached blocks to the device."""
        self.reserved -= sum(block.nbytes for pool in self._pools.values() for block in pool)
        self._pools.clear()

    def free(self, block: Block, access: Access, done: Callable[[], bool]) -> None:
        """Free ``block``. ``done()``: whether all present work of the streams in ``block.recorded`` is over."""
        block.freed = access
        if block.recorded:
            self._returning.append((block, done))
        else:
            self._pools[block.home].append(block)

    def _process_returning(self) -> None:
        waiting = []
        for block, done in self._returning:
            if done():
                self._pools[block.home].append(block)
            else:
                waiting.append((block, done))
        self._returning = waiting
