"""A list scheduler: it runs all ranks on one clock. Whenever a rank is free it takes the operation that a pattern has
next.

A *pattern* (the "building block" of arXiv 2405.15362, section 3) gives the slot in which a rank would run the forward
and backward of each chunk's first microbatch; every further microbatch is one period later. If the pattern's next
operation cannot run yet, a rank takes the first of these: a backward that can run; a forward that is not far behind and
leaves memory for the forwards before it; a weight gradient; nothing. So weight gradients fill bubbles, and memory stays
under a limit. Forwards, backwards and weight gradients of a chunk each keep the order of microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from megatron_pp.plan.costs.stage_costs import MemoryModel, StageCosts
from megatron_pp.plan.ir.dataflow import RESULT_OF, consumer_of, inputs_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Instruction, instruction
from megatron_pp.plan.ir.ledger import IN_FLIGHT, WEIGHT_BACKLOG
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders.family import Order

if TYPE_CHECKING:
    from megatron_pp.plan.costs.measured import Measured

UNKNOWN = float("inf")
ROUNDING = 1e-9  # share of a memory limit by which sums of measured numbers may miss it

Slots = Sequence[Mapping[tuple[str, int, int], float]]
"""``slots[rank][(op, chunk, mb)]`` for FORWARD and BACKWARD (also a split one): the pattern's order of a rank's
forwards and backwards, ascending with the microbatch."""


@dataclass(frozen=True)
class Problem:
    """The problem to schedule. ``transfer``: time of a message between two ranks whose link is not in ``links``."""

    placement: Placement
    num_microbatches: int
    memory: MemoryModel
    costs: StageCosts
    transfer: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int, measured: Measured) -> Problem:
        """The problem with measured times and memory."""
        costs = measured.costs(placement.num_stages)
        memory = measured.memory(placement)
        return cls(placement, num_microbatches, memory, costs, measured.transfer, measured.each_link)

    def transfer_time(self, source: int, target: int) -> float:
        return self.links.get((source, target), self.transfer)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Each microbatch's share of the costs."""
        return self.costs.of_microbatches(self.num_microbatches)


@dataclass(frozen=True)
class Rules:
    """The rules by which the scheduler decides.

    ahead     a forward at most this number of slots behind the pattern's next operation may run first if that one waits
    reserve   memory that such a forward must leave free, unless its chunk is the rank's last
    split     whether backwards are split in two
    patience  a weight gradient waits for an operation whose input comes within this share of the gradient's own time
    """

    ahead: float = 0.0
    reserve: float = 0.0
    split: bool = True
    patience: float = 0.0


@dataclass(frozen=True)
class Scheduled:
    """Orders, and the end of their last operation."""

    orders: list[Order]
    makespan: float


def schedule(problem: Problem, slots: Slots, rules: Rules, most: float = UNKNOWN) -> Scheduled | None:
    """The scheduler's result; None if memory does not suffice or the result takes longer than ``most``."""
    return _ScheduleTimes(problem, slots, rules, most * (1 + ROUNDING)).run()


class _ScheduleTimes:
    """All ranks on one clock. ``arrivals[(op, stage)][mb]``: when the result arrives where it is needed next."""

    def __init__(self, problem: Problem, slots: Slots, rules: Rules, most: float) -> None:
        self.most = most
        self.placement = problem.placement
        self.costs = problem.costs
        self.problem = problem
        self.arrivals = {
            (op, stage): [UNKNOWN] * problem.num_microbatches
            for op in (FORWARD, BACKWARD)
            for stage in range(self.placement.num_stages)
        }
        self.ranks = [_ScheduledRank(problem, rules, rank, slot, self.arrivals) for rank, slot in enumerate(slots)]
        self.agenda: list[tuple[float, int]] = [(0.0, rank.number) for rank in self.ranks]

    def run(self) -> Scheduled | None:
        makespan = 0.0
        while self.agenda:
            now, number = heappop(self.agenda)
            rank = self.ranks[number]
            if rank.free_at > now:
                continue
            chosen = rank.choose(now)
            if chosen is not None:
                makespan = max(makespan, self._start(rank, now, chosen))
                if rank.free_at + rank.work_left > self.most:
                    return None
            elif rank.wake_at > now:
                heappush(self.agenda, (rank.wake_at, number))
        if any(rank.weights or min(rank.next.values()) < rank.microbatches for rank in self.ranks):
            return None
        return Scheduled([rank.order for rank in self.ranks], makespan)

    def _start(self, rank: _ScheduledRank, now: float, chosen: Instruction) -> float:
        stage = self.placement.stages[rank.number][chosen.chunk]
        end = now + self.costs.of(chosen.op, stage) * self.problem.shares[chosen.mb]
        rank.take(chosen, end)
        heappush(self.agenda, (end, rank.number))
        if chosen.op in RESULT_OF:
            consumer = consumer_of(chosen.op, stage, self.placement.num_stages)
            arrival = end
            if consumer is not None:
                home = self.placement.homes[consumer][0]
                if home != rank.number:
                    arrival += self.problem.transfer_time(rank.number, home)
                heappush(self.agenda, (arrival, home))
            self.arrivals[(RESULT_OF[chosen.op], stage)][chosen.mb] = arrival
        return end


class _ScheduledRank:
    """One rank: what is left to do, what memory is used, and the choice of the next operation."""

    def __init__(
        self,
        problem: Problem,
        rules: Rules,
        number: int,
        slots: Mapping[tuple[str, int, int], float],
        arrivals: Mapping[tuple[str, int], Sequence[float]],
    ) -> None:
        self.number = number
        self.slots = slots
        self.arrivals = arrivals
        self.rules = rules
        self.costs = problem.costs
        self.shares = problem.shares
        self.memory = problem.memory
        self.limit = problem.memory.limits[number] * (1 + ROUNDING)
        self.microbatches = problem.num_microbatches
        self.stages = problem.placement.stages[number]
        count = problem.placement.num_stages
        self.next = {(op, chunk): 0 for op in (FORWARD, BACKWARD) for chunk in range(len(self.stages))}
        self.needs = {(op, chunk): inputs_of(op, self.stages[chunk], count) for op, chunk in self.next}
        self.weights: deque[tuple[int, int]] = deque()
        self.forward_ends: dict[tuple[int, int], float] = {}
        self.order: Order = []
        ops = (FORWARD, INPUT_GRAD, WEIGHT_GRAD) if rules.split else (FORWARD, BACKWARD)
        self.work_left = sum(self.shares) * sum(self.costs.of(op, stage) for op in ops for stage in self.stages)
        self.used = 0.0
        self.free_at = 0.0
        self.wake_at = 0.0

    def choose(self, now: float) -> Instruction | None:
        """The operation to start now; None if the rank has to wait, until ``wake_at`` if that is known."""
        self.wake_at = 0.0
        heads = sorted(
            (self.slots[(op, chunk, mb)], op, chunk, mb)
            for (op, chunk), mb in self.next.items()
            if mb < self.microbatches
        )
        for _, kind, chunk, mb in self._eligible(heads, now):
            return instruction(INPUT_GRAD if self.rules.split and kind == BACKWARD else kind, chunk, mb)
        if not self.weights or (self.rules.patience and self._comes_soon(heads, now)):
            return None
        return instruction(WEIGHT_GRAD, *self.weights[0])

    def _eligible(self, heads: list[tuple[float, str, int, int]], now: float) -> list[tuple[float, str, int, int]]:
        """The next operations of each kind that may run now, best first."""
        if not heads:
            return []
        first_slot, op, chunk, mb = heads[0]
        if self._input_at(op, chunk, mb) <= now and (op == BACKWARD or self._fits(chunk, 0.0)):
            return heads[:1]
        ready = [head for head in heads if self._input_at(head[1], head[2], head[3]) <= now]
        backwards = [head for head in ready if head[1] == BACKWARD]
        return backwards or [
            head
            for head in ready
            if head[0] - first_slot <= self.rules.ahead
            and self._fits(head[2], self.rules.reserve if head[2] < len(self.stages) - 1 else 0.0)
        ]

    def _fits(self, chunk: int, reserve: float) -> bool:
        return self.used + self.memory.forward[self.stages[chunk]] + reserve <= self.limit

    def _input_at(self, kind: str, chunk: int, mb: int) -> float:
        """The time at which all inputs of the operation exist here."""
        there = 0.0
        for result in self.needs[(kind, chunk)]:
            if result[1] == self.stages[chunk]:
                there = max(there, self.forward_ends.get((chunk, mb), UNKNOWN))
            else:
                there = max(there, self.arrivals[result][mb])
        return there

    def _comes_soon(self, heads: list[tuple[float, str, int, int]], now: float) -> bool:
        """Whether an operation that memory does not hold back gets its input within the rules' patience."""
        chunk, mb = self.weights[0]
        until = now + self.rules.patience * self.costs.weight[self.stages[chunk]] * self.shares[mb]
        coming = []
        for _, op, chunk, mb in heads:
            at = self._input_at(op, chunk, mb)
            if now < at < until and (op == BACKWARD or self._fits(chunk, 0.0)):
                coming.append(at)
        self.wake_at = min(coming, default=0.0)
        return bool(coming)

    def take(self, chosen: Instruction, end: float) -> None:
        """``chosen`` starts now and ends at ``end``."""
        op = chosen.op
        chunk = chosen.chunk
        mb = chosen.mb
        forward = self.memory.forward[self.stages[chunk]]
        weight = self.memory.weight[self.stages[chunk]]
        self.used += IN_FLIGHT[op] * forward + WEIGHT_BACKLOG[op] * weight
        if op == FORWARD:
            self.forward_ends[(chunk, mb)] = end
        elif op == INPUT_GRAD:
            self.weights.append((chunk, mb))
        elif op == WEIGHT_GRAD:
            self.weights.popleft()
        if op in RESULT_OF:
            self.next[(RESULT_OF[op], chunk)] = mb + 1
        self.order.append(chosen)
        self.work_left -= self.costs.of(op, self.stages[chunk]) * self.shares[mb]
        self.free_at = end
