"""Orders in which no microbatch waits: it starts when all ranks have room for its whole way forward and back.

If the memory limit makes a step long, a microbatch must not keep memory longer than necessary. Weight gradients fill
the gaps: when a forward needs memory, the oldest weight gradient runs as early as possible.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import product

from megatron_pp.plan.ir.instruction import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Instruction, instruction
from megatron_pp.plan.orders.list_scheduler import ROUNDING, Problem, Scheduled

_CLOSE = 1e-9
_TRIES = 100  # starts that are tried for one microbatch


def no_wait(problem: Problem) -> Scheduled | None:
    """The orders and their end; None if none are found. Two microbatches start at least the busiest rank's work
    apart."""
    return _Trips(problem).run()


@dataclass
class _UnblockedRank:
    """The operations of one rank, and its memory.

    runs     (start, end, operation), sorted
    kept     memory at the time up to which changes were merged
    changes  (time, amount) of each later change of memory
    waiting  (end of its backward, stage, microbatch) of each W that has not run yet
    """

    limit: float
    kept: float = 0.0
    runs: list[tuple[float, float, Instruction]] = field(default_factory=list)
    changes: list[tuple[float, float]] = field(default_factory=list)
    waiting: list[tuple[float, int, int]] = field(default_factory=list)  # end, stage, microbatch

    def copied(self) -> _UnblockedRank:
        return _UnblockedRank(self.limit, self.kept, self.runs.copy(), self.changes.copy(), self.waiting.copy())

    def free_from(self, time: float, took: float) -> float:
        """The first start, not before ``time``, of an operation that takes ``took``."""
        for start, end, _ in self.runs[max(0, bisect_left(self.runs, (time,)) - 1) :]:
            if start >= time + took - _CLOSE:
                break
            time = max(time, end)
        return time

    def kept_at(self, time: float) -> float:
        return self.kept + sum(amount for when, amount in self.changes if when <= time + _CLOSE)

    def forget(self, time: float) -> None:
        """Merges the changes up to ``time``. Earlier times are not needed any more."""
        self.kept = self.kept_at(time)
        self.changes = [change for change in self.changes if change[0] > time + _CLOSE]


class _Trips:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs = problem.costs
        self.memory = problem.memory
        self.homes = problem.placement.homes
        self.ranks = [_UnblockedRank(limit * (1 + ROUNDING)) for limit in problem.memory.limits]
        stages = range(len(self.homes))
        self.path: list[tuple[float, str, int]] = []  # of a microbatch: start, operation, stage
        now = 0.0
        before = self.homes[0][0]
        for op, stage in [*product((FORWARD,), stages), *product((INPUT_GRAD,), reversed(stages))]:
            rank = self.homes[stage][0]
            now += problem.transfer_time(before, rank) if rank != before else 0.0
            self.path.append((now, op, stage))
            now, before = now + self.costs.of(op, stage), rank

    def run(self) -> Scheduled | None:
        ops = (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
        rows = self.problem.placement.stages
        apart = max(sum(self.costs.of(op, stage) for op in ops for stage in row) for row in rows)
        start = 0.0
        for mb in range(self.problem.num_microbatches):
            for _ in range(_TRIES):
                later = self._blocked(start) or self._started(mb, start)
                if not later:
                    break
                start += later
            else:
                return None
            start += apart
            for rank in self.ranks:
                rank.forget(start)
        for rank in self.ranks:
            while rank.waiting:
                self._run_weight(rank)
        orders = [[at for _, _, at in rank.runs] for rank in self.ranks]
        return Scheduled(orders, max(rank.runs[-1][1] for rank in self.ranks))

    def _blocked(self, start: float) -> float:
        """How much later a microbatch must start because its ranks are busy."""
        later = 0.0
        for time, op, stage in self.path:
            rank = self.ranks[self.homes[stage][0]]
            later = max(later, rank.free_from(start + time, self.costs.of(op, stage)) - (start + time))
        return later if later > _CLOSE else 0.0

    def _started(self, mb: int, start: float) -> float:
        """Starts the microbatch and returns 0. If there is no memory, returns how much later there may be."""
        ranks = [rank.copied() for rank in self.ranks]
        for time, op, stage in self.path:
            self._add(ranks[self.homes[stage][0]], start + time, op, stage, mb)
        later = max(self._make_room(rank, start) for rank in ranks)
        if not later:
            self.ranks = ranks
        return later

    def _add(self, rank: _UnblockedRank, start: float, op: str, stage: int, mb: int) -> None:
        end = start + self.costs.of(op, stage)
        forward = self.memory.forward[stage]
        weight = self.memory.weight[stage]
        insort(rank.runs, (start, end, instruction(op, self.homes[stage][1], mb)))
        if op == FORWARD:
            rank.changes.append((start, forward))
        elif op == INPUT_GRAD:
            rank.changes.append((end, weight - forward))
            insort(rank.waiting, (end, stage, mb))
        else:
            rank.changes.append((end, -weight))

    def _run_weight(self, rank: _UnblockedRank) -> float:
        """Runs the oldest weight gradient. Returns its end."""
        after, stage, mb = rank.waiting.pop(0)
        took = self.costs.of(WEIGHT_GRAD, stage)
        start = rank.free_from(after, took)
        self._add(rank, start, WEIGHT_GRAD, stage, mb)
        return start + took

    def _make_room(self, rank: _UnblockedRank, since: float) -> float:
        """Runs weight gradients to make room for forwards from ``since`` on, and returns 0. If they do not make enough
        room, returns how much later there may be enough."""
        for now in sorted(start for start, _, at in rank.runs if at.op == FORWARD and start >= since - _CLOSE):
            while rank.waiting and rank.kept_at(now) > rank.limit:
                first = rank.waiting[0][0]
                until = first if first > now + _CLOSE else self._run_weight(rank)
                if until > now + _CLOSE:
                    return until - now
        return 0.0
