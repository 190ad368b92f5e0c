"""Longest paths through a step: how early each operation can start, and how much time must still follow.

The microbatches of a stage have equal costs, so its operations are numbered in the order in which they run. The k-th
forward starts after k + 1 forwards of the stage before have ended, and the k-th backward after the stage's own k-th
forward. So the paths hold for every order of microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_pp.plan.costs.stage_costs import Network, StageCosts
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD
from megatron_pp.plan.ir.placement import Placement

Times = tuple[float, ...]  # one time for each stage
Table = list[list[float]]  # [k][stage]


@dataclass(frozen=True)
class StageTimes:
    """The least times of one operation of each stage, in any plan.

    forward    a forward
    backward   from the start of a backward to its input gradient: I, or B if that is shorter or backwards are whole
    rest       the rest of the microbatch's backward work, of B or I + W, whichever is less
    output     from the start of a forward to the output's arrival at the next stage
    gradient   from the start of a backward to the input gradient's arrival at the stage before
    early      how long before the end of its backward's work a gradient may be sent (if the backward is in a pair)
    """

    forward: Times
    backward: Times
    rest: Times
    output: Times
    gradient: Times
    early: Times

    @classmethod
    def of(
        cls, placement: Placement, costs: StageCosts, network: Network, split: bool, forward_only: bool, slices: int
    ) -> StageTimes:
        """The times for ``costs``; if sequences are cut, those of the cheapest slice."""
        count = placement.num_stages
        part = min(costs.of_parts(slices))
        forward = tuple(part * time for time in costs.forward)
        whole = [part * time for time in costs.backward]
        backward = whole
        rest = [0.0] * count
        if split:
            inputs = [part * time for time in costs.backward_input]
            weights = [part * time for time in costs.weight]
            backward = [min(whole[s], inputs[s]) for s in range(count)]
            rest = [min(whole[s], inputs[s] + weights[s]) - backward[s] for s in range(count)]
        if forward_only:
            whole = backward = rest = [0.0] * count
        early = [0.0] * count
        shares = costs.joined_sends
        out = list(forward)
        back = list(backward)
        if min(shares) < 1 and not forward_only:
            for stage, (rank, _) in enumerate(placement.homes):
                partners = placement.stages[rank]
                out[stage] = min(out[stage], shares[0] * (forward[stage] + min(whole[s] for s in partners)))
                back[stage] = min(back[stage], shares[1] * (whole[stage] + min(forward[s] for s in partners)))
                early[stage] = whole[stage] - backward[stage] + max(forward[s] for s in partners)
        for stage in range(count - 1):
            source = placement.homes[stage][0]
            target = placement.homes[stage + 1][0]
            if source != target:
                out[stage] += network.message_time(FORWARD, source, target, slices)
                back[stage + 1] += network.message_time(BACKWARD, target, source, slices)
        return cls(forward, tuple(backward), tuple(rest), tuple(out), tuple(back), tuple(early))

    @cached_property
    def trips(self) -> Times:
        """The least time from the start of a stage's forward to the end of the same microbatch's backward there."""
        there = 0.0  # from the output's arrival at the next stage to the arrival of its gradient here
        trips = []
        for stage in reversed(range(len(self.forward))):
            before = max(self.forward[stage], self.output[stage] + there)
            trips.append(before + self.backward[stage])
            there = before + self.gradient[stage]
        return tuple(reversed(trips))


@dataclass(frozen=True)
class Paths:
    """``forward[k][stage]`` and ``backward[k][stage]`` of the k-th operation: its earliest start (heads), or the least
    time from its start to the end of the step (tails).
    """

    forward: Table
    backward: Table


class Wait(NamedTuple):
    """Forward k + ``most`` of ``stage`` cannot start earlier than ``time`` after the start of backward k of ``until``:
    it waits for the backward's input gradient, or, if ``whole``, for its W.
    """

    stage: int
    most: int
    until: int
    time: float
    whole: bool


@dataclass(frozen=True)
class PathFinder:
    """Finds longest paths. ``waits`` are waits of forwards for memory. The argument ``least`` of its methods has lower
    bounds that are already known."""

    times: StageTimes
    rounds: int
    waits: tuple[Wait, ...] = ()
    forward_only: bool = False

    def heads(self, least: Paths | None = None) -> Paths:
        least = least or self.nothing
        times = self.times
        last = len(self.times.forward) - 1
        found = Paths([], [])
        waits = [[wait for wait in self.waits if wait.stage == s] for s in range(last + 1)]
        for k in range(self.rounds):
            row: list[float] = []
            for s in range(last + 1):
                start = least.forward[k][s]
                if s:
                    start = max(start, row[s - 1] + times.output[s - 1])
                if k:
                    start = max(start, found.forward[k - 1][s] + times.forward[s])
                for wait in waits[s]:
                    if k >= wait.most:
                        start = max(start, found.backward[k - wait.most][wait.until] + wait.time)
                row.append(start)
            back = [0.0] * len(row)
            for s in range(last, -1, -1):
                start = max(least.backward[k][s], row[s] + times.forward[s])
                if s < last:
                    start = max(start, back[s + 1] + times.gradient[s + 1])
                if k:
                    start = max(start, found.backward[k - 1][s] + times.backward[s])
                back[s] = start
            found.forward.append(row)
            found.backward.append(back)
        return found

    @property
    def nothing(self) -> Paths:
        """Paths of length 0."""
        stages = len(self.times.forward)
        forward, backward = ([[0.0] * stages for _ in range(self.rounds)] for _ in range(2))
        return Paths(forward, backward)

    def tails(self, least: Paths | None = None) -> Paths:
        """Lower bounds on the time from each start to the end of the step, at least ``least``."""
        least = least or self.nothing
        times = self.times
        last = len(self.times.forward) - 1
        forward: Table = [[]] * self.rounds
        backward: Table = [[]] * self.rounds
        waits = [[wait for wait in self.waits if wait.until == s] for s in range(last + 1)]
        for k in range(self.rounds - 1, -1, -1):
            row: list[float] = []
            for s in range(last + 1):
                left = max(least.backward[k][s], times.backward[s] + times.rest[s])
                if s:
                    left = max(left, times.gradient[s] + row[s - 1])
                if k + 1 < self.rounds:
                    left = max(left, times.backward[s] + backward[k + 1][s])
                for wait in waits[s]:
                    if k + wait.most < self.rounds:
                        left = max(left, wait.time + forward[k + wait.most][wait.stage])
                row.append(left)
            backward[k] = row
            ahead = [0.0] * len(row)
            for s in range(last, -1, -1):
                left = max(least.forward[k][s], times.forward[s] + (0.0 if self.forward_only else row[s]))
                if s < last:
                    left = max(left, times.output[s] + ahead[s + 1])
                if k + 1 < self.rounds:
                    left = max(left, times.forward[s] + forward[k + 1][s])
                ahead[s] = left
            forward[k] = ahead
        return Paths(forward, backward)
