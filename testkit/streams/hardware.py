"""Hardware that the streams of one device share: queues, and multiprocessors for kernels.

Commands in one hardware queue begin in the order of issue. So a command that waits for its stream blocks the commands
behind it. CUDA_DEVICE_MAX_CONNECTIONS is the number of queues, 1 to 32 (CUDA C++ programming guide, environment
variables). It is not documented which streams share a queue, so a seed chooses.

A kernel of NCCL occupies multiprocessors (nccl#689), as many as its communicator may use, from its start on the stream
until its peer has answered. So kernels that wait for peers can keep each other, and compute, from starting (NCCL user
guide, "Using multiple NCCL communicators concurrently"; nccl#195, nccl#522).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from testkit.streams.timelines import Clock, Lane, Transfer


class HardwareQueues:
    """The queues of the devices. ``count``: queues of one device; 0: every stream has its own. ``seed`` 0 gives streams
    the queues in turn, in the order of their first use; another seed draws them."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._count = count
        self._rng = random.Random(seed) if seed else None
        self._of: dict[Lane, int] = {}
        self._heads: dict[int, set[Transfer]] = {}  # by queue: operations that must begin before the next one there

    def issue(self, lane: Lane) -> None:
        """The host issues a command to ``lane``. All earlier commands in its queue begin first."""
        if not self._count:
            return
        number = self._of.get(lane)
        if number is None:
            turn = len(self._of) if self._rng is None else self._rng.randrange(self._count)
            number = self._of[lane] = turn % self._count
        lane.pending |= self._heads.get(number, set())
        self._heads[number] = set(lane.unfinished())


class Kernel:
    """An operation on the stream ``lane`` of ``device`` that is not a transfer. It begins if there is room, and is then
    over."""

    thread_blocks = 1
    left = 0
    queue = None
    partners: Sequence[Any] = ()
    has_begun = finished = False

    def __init__(self, device: Any, lane: Lane) -> None:
        self.device, self.rank = device, device.rank
        self.needs = set(lane.unfinished())
        self.end: Clock = {}


def begin(works: Sequence[Any], multiprocessors: int) -> bool:
    """Begin those of ``works`` that can begin: their streams have reached them, and there is room. ``works`` are the
    unfinished operations of one device, in the order of issue. Returns whether any has begun."""
    free = multiprocessors - sum(work.thread_blocks for work in works if work.has_begun)
    any_began = False
    for work in works:
        if not work.has_begun and work.thread_blocks <= free and all(need.finished for need in work.needs):
            work.has_begun = any_began = True
            free -= work.thread_blocks
    return any_began
