"""One machine that jobs take turns on: the least time for all of them."""

from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple


class Job(NamedTuple):
    """``head``: before it can start. ``time``: on the machine. ``tail``: what takes place after it."""

    head: float
    time: float
    tail: float


def least_end(jobs: Iterable[Job]) -> float:
    """When the last tail is over, at the least, if jobs may be interrupted: 0 without jobs.

    Jackson's preemptive schedule, which is the best one with interruptions: of the jobs that can start, always the one
    with the longest tail. It equals the maximum over all sets of jobs of least head + sum of times + least tail
    (Carlier 1982, "The one-machine sequencing problem").
    """
    waiting: list[tuple[float, float]] = []  # (-tail, time left)
    now = end = 0.0
    for head, time, tail in sorted(jobs):
        while waiting and now < head:
            longest, left = waiting[0]
            if now + left > head:
                heapreplace(waiting, (longest, left - (head - now)))
                now = head
            else:
                heappop(waiting)
                now += left
                end = max(end, now - longest)
        now = max(now, head)
        heappush(waiting, (-tail, time))
    while waiting:
        longest, left = heappop(waiting)
        now += left
        end = max(end, now - longest)
    return end
