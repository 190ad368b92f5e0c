"""A stream-ordered caching allocator, as PyTorch's: which freed block a tensor gets.

Freed memory returns at once to the pool of the stream that it was allocated on, though that stream and others may not
have come so far; a later allocation on that stream gets it without waiting. Streams named by ``record_stream`` are the
exception: the block returns when the allocator, at an allocation, finds that their work is done.

Of all blocks that PyTorch's might give (it splits larger ones), this one gives the most dangerous.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from megatron_pp.testing.streams.memory import Access, Block
from megatron_pp.testing.streams.timelines import Clock, Timeline

_UNIT = 512  # bytes; sizes are rounded up to it


class CachingAllocator:
    """The memory of one device. Blocks of a stream's pool lie in the order in which they were freed."""

    def __init__(self) -> None:
        self.reused = 0
        self._pools: defaultdict[Timeline, list[Block]] = defaultdict(list)
        # Freed blocks that wait for streams named by record_stream; whether their work is done, as of then.
        self._returning: list[tuple[Block, Callable[[], bool]]] = []
        self._made = 0

    def allocate(self, nbytes: int, stream: Timeline, clock: Callable[[], Clock]) -> Block:
        """A block for ``nbytes`` on ``stream``. ``clock()``: what has happened before its next step."""
        self._process_returning()
        size = max(_UNIT, -(-nbytes // _UNIT) * _UNIT)
        pool = self._pools[stream]
        fitting = [block for block in pool if block.nbytes >= size]
        if not fitting:
            self._made += 1
            return Block(self._made, size, stream)
        now = clock()
        chosen = next((block for block in fitting if block.unordered(now)), None)
        if chosen is None:
            chosen = min(fitting, key=lambda block: (block.nbytes, block.number))
            chosen.is_shared = False  # all that was done to it has happened before
        pool.remove(chosen)
        self.reused += 1
        chosen.owner += 1
        chosen.recorded.clear()
        return chosen

    def free(self, block: Block, access: Access, done: Callable[[], bool]) -> None:
        """``block`` is given back. ``done()``: is all work over that the streams of ``block.recorded`` have now?"""
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
