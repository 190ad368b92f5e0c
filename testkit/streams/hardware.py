"""What the streams of one device share: hardware queues, and room for kernels.

Commands of streams in one hardware queue begin in the order of issue, so one that waits for its stream holds up those
behind it. CUDA_DEVICE_MAX_CONNECTIONS says how many queues there are, 1 to 32 (CUDA C++ programming guide, environment
variables); which streams share one nobody says, so a seed does.

A kernel of NCCL takes multiprocessors of its own (nccl#689), all that its communicator may use, from when its stream
has come to it until its peer has answered. Kernels that wait for peers can so keep each other, and compute, from
beginning (NCCL user guide, "Using multiple NCCL communicators concurrently"; nccl#195, nccl#522).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from testkit.streams.timelines import Clock, Lane, Transfer


class HardwareQueues:
    """``count``: of one device; 0: every stream has its own. ``seed``: streams take turns at them in the order of their
    first use where it is 0, else they are drawn."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._count = count
        self._rng = random.Random(seed) if seed else None
        self._of: dict[Lane, int] = {}
        self._heads: dict[int, set[Transfer]] = {}  # by queue: what has to finish before what is issued there begins

    def issue(self, lane: Lane) -> None:
        """The host issues a command to ``lane``: all before it in its queue begins first."""
        if not self._count:
            return
        number = self._of.get(lane)
        if number is None:
            turn = len(self._of) if self._rng is None else self._rng.randrange(self._count)
            number = self._of[lane] = turn % self._count
        lane.pending |= self._heads.get(number, set())
        self._heads[number] = set(lane.unfinished())


class Kernel:
    """An operation of ``device``'s stream ``lane`` that is no transfer: it begins where there is room, and is over."""

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
    """Begin those of ``works``, what is unfinished on one device, in the order of issue, that can: their streams have
    come to them, and there is room. Returns whether any has begun."""
    free = multiprocessors - sum(work.thread_blocks for work in works if work.has_begun)
    any_began = False
    for work in works:
        if not work.has_begun and work.thread_blocks <= free and all(need.finished for need in work.needs):
            work.has_begun = any_began = True
            free -= work.thread_blocks
    return any_began
