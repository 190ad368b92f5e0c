"""Local search: makes known compute orders shorter by moving single operations on the critical path.

Microbatches of a stage stay in their order, so a rank's order is a row of *tokens* (forward, backward or weight
gradient of a chunk). As in tabu searches for job shops (Nowicki and Smutnicki 1996; Balas and Vazacopoulos 1998), the
critical path consists of blocks, each without a pause on one rank, and only moves to the start or end of a block can
shorten it. A move is judged by the longest new path through the moved operations. The best move to orders that were not
seen before is made, also if it makes the step longer. No choice depends on the machine's clock, because each rank runs
the search and all must find the same orders.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, instruction
from megatron_pp.plan.orders.family import Order
from megatron_pp.plan.orders.list_scheduler import ROUNDING, Problem, Scheduled

_F, _B, _W = range(3)
_NEVER = -1.0
_IDLE = 40  # steps without a shorter order before a kick
_KICKS = 3  # random swaps in a kick
_TRIES = 60  # random swaps that are tried for a kick
_CLOSE = 1e-9

Row = tuple[int, ...]  # a rank's tokens: 3 * chunk + kind
Rows = tuple[Row, ...]


@dataclass(frozen=True)
class _Timing:
    """The times of rows.

    starts    start of each operation
    arrivals  arrival of each operation's result at the operation that uses it
    tails     least time from each operation's end to the end of the step
    lines     the operations of each rank
    """

    makespan: float
    starts: list[float]
    arrivals: list[float]
    tails: list[float]
    lines: list[list[int]]


def improved(problem: Problem, found: Scheduled, least: float, budget: int, most: int = 1) -> list[Scheduled]:
    """The ``most`` shortest orders that the search visits, beginning with ``found``; the shortest first.

    least   a lower bound; the search ends when it is reached
    budget  number of single operations that the search may evaluate; two million take about a second
    """
    return _Improvement(problem, found).run(least, budget, most)


class _Shop:
    """The operations with their times, needs and memory. The k-th forward, backward or weight gradient of a stage has
    the number ``(3 * stage + kind) * M + k``.
    """

    def __init__(self, problem: Problem, split: bool) -> None:
        self.count = problem.num_microbatches
        self.placement = problem.placement
        self.memory = problem.memory
        self.split = split
        costs = problem.costs
        stages = problem.placement.num_stages
        backward = costs.backward_input if split else costs.backward
        each = [time for s in range(stages) for time in (costs.forward[s], backward[s], costs.weight[s])]
        self.times = [time * share for time in each for share in problem.shares]
        self.needs, self.users = [-1] * len(self.times), [-1] * len(self.times)
        self.channels = [-1] * len(self.times)  # channel of the message with its result; -1 on the same rank
        self.transfers = [0.0] * len(self.times)  # time of that message
        for s in range(stages):
            if s:
                self._connect((s - 1, _F), (s, _F), problem)
            self._connect((s + 1, _B) if s + 1 < stages else (s, _F), (s, _B), problem)
        self.bases = [[(3 * s + kind) * self.count for s in row for kind in range(3)] for row in self.placement.stages]

    def _connect(self, source: tuple[int, int], target: tuple[int, int], problem: Problem) -> None:
        """Records that ``target`` needs the result of ``source``; both are (stage, kind)."""
        one, two = (self.count * (3 * stage + kind) for stage, kind in (source, target))
        rank, other = (self.placement.homes[stage][0] for stage, _ in (source, target))
        ranks = self.placement.pipeline_size
        for k in range(self.count):
            self.needs[two + k], self.users[one + k] = one + k, two + k
            if rank != other:
                self.channels[one + k] = (source[1] * ranks + rank) * ranks + other
                self.transfers[one + k] = problem.transfer_time(rank, other)

    def numbered(self, rank: int, row: Sequence[int]) -> list[int]:
        """The numbers of the operations that the tokens of ``rank`` name."""
        following = list(self.bases[rank])
        line = []
        for token in row:
            line.append(following[token])
            following[token] += 1
        return line

    def keeps_to_limits(self, rank: int, row: Sequence[int]) -> bool:
        """Whether every W follows its backward, and memory stays under the limit. (``timed`` refuses a backward before
        its forward.)
        """
        stages = self.placement.stages[rank]
        limit = self.memory.limits[rank] * (1 + ROUNDING)
        alive = [0] * len(stages)
        waiting = [0] * len(stages)
        forward = [self.memory.forward[s] for s in stages]
        weight = [self.memory.weight[s] for s in stages]
        for token in row:
            chunk, kind = divmod(token, 3)
            if kind == _F:
                alive[chunk] += 1
            elif kind == _B:
                alive[chunk] -= 1
                waiting[chunk] += self.split
            else:
                waiting[chunk] -= 1
                if waiting[chunk] < 0:
                    return False
            kept = sum(n * f for n, f in zip(alive, forward, strict=True))
            if kept + sum(n * w for n, w in zip(waiting, weight, strict=True)) > limit:
                return False
        return True

    def timed(self, rows: Rows) -> _Timing | None:
        """The rows with their times; None if operations wait for each other."""
        lines = [self.numbered(rank, row) for rank, row in enumerate(rows)]
        starts = [0.0] * len(self.times)
        arrivals = [_NEVER] * len(self.times)
        waiting: dict[int, int] = {}  # result -> the rank that waits for it
        free = [0.0] * len(rows)
        at = [0] * len(rows)
        turn = [0.0] * (2 * len(rows) ** 2)
        ran: list[int] = []
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            line = lines[rank]
            now = free[rank]
            i = at[rank]
            while i < len(line):
                number = line[i]
                need = self.needs[number]
                if need >= 0:
                    if arrivals[need] < 0:
                        waiting[need] = rank
                        break
                    now = max(now, arrivals[need])
                starts[number] = now
                now += self.times[number]
                channel = self.channels[number]
                there = now
                if channel >= 0:  # a channel carries one message at a time
                    there = turn[channel] = max(now, turn[channel]) + self.transfers[number]
                arrivals[number] = there
                ran.append(number)
                if number in waiting:
                    ready.append(waiting.pop(number))
                i += 1
            free[rank], at[rank] = now, i
        if len(ran) < sum(map(len, lines)):
            return None
        return _Timing(max(free), starts, arrivals, self._tails(lines, ran), lines)

    def _tails(self, lines: Sequence[Sequence[int]], ran: Sequence[int]) -> list[float]:
        tails = [0.0] * len(self.times)
        following = [-1] * len(self.times)
        for line in lines:
            for one, two in pairwise(line):
                following[one] = two
        for number in reversed(ran):
            left = self.tail_by_user(number, tails)
            if following[number] >= 0:
                left = max(left, self.times[following[number]] + tails[following[number]])
            tails[number] = left
        return tails

    def tail_by_user(self, number: int, tails: Sequence[float]) -> float:
        """The least time from the end of an operation to the end of the step through the user of its result."""
        user = self.users[number]
        if user < 0:
            return 0.0
        return self.times[user] + tails[user] + self.transfers[number]


class _Improvement:
    def __init__(self, problem: Problem, found: Scheduled) -> None:
        self.found = found
        whole = any(at.op == BACKWARD for order in found.orders for at in order)
        self.shop = _Shop(problem, not whole)
        kinds = {FORWARD: _F, BACKWARD: _B, INPUT_GRAD: _B, WEIGHT_GRAD: _W}
        self.random = Random(0)
        self.seen = set[int]()
        self.work = 0
        self.size = sum(map(len, found.orders))
        self.rows: Rows = tuple(tuple(3 * at.chunk + kinds[at.op] for at in order) for order in found.orders)

    def run(self, least: float, budget: int, most: int) -> list[Scheduled]:
        rows = self.rows
        timing = self.shop.timed(self.rows)
        if timing is None:
            return [self.found]
        best = timing.makespan
        best_rows = rows
        idle = 0
        found = [(best, 0, rows)]
        self.seen.add(hash(rows))
        while self.work < budget and best > least * (1 + _CLOSE):
            step = self._step(rows, timing) if idle < _IDLE else None
            if step is None:
                step = self._kicked(best_rows)
                idle = 0
                if step is None:
                    break
            rows, timing = step
            idle += 1
            better = timing.makespan < found[-1][0] or len(found) < most
            if better and all(rows != known for _, _, known in found):
                found = sorted([*found, (timing.makespan, len(self.seen), rows)])[:most]
            if timing.makespan < best * (1 - _CLOSE):
                best = timing.makespan
                best_rows = rows
                idle = 0
        return [Scheduled([self._order(rank, row) for rank, row in enumerate(rows)], time) for time, _, rows in found]

    def _kicked(self, rows: Rows) -> tuple[Rows, _Timing] | None:
        """``rows`` after a few random swaps of neighbours; None if none is possible."""
        found = None
        made = 0
        for _ in range(_TRIES):
            rank = self.random.randrange(len(rows))
            row = list(rows[rank])
            i = self.random.randrange(max(1, len(row) - 1))
            two = row[i : i + 2]
            row[i : i + 2] = reversed(two)
            new = (*rows[:rank], tuple(row), *rows[rank + 1 :])
            self.work += len(row)
            if len(set(two)) < 2 or not self.shop.keeps_to_limits(rank, row):
                continue
            after = self.shop.timed(new)
            self.work += 3 * self.size
            if after is not None:
                rows = new
                found = (new, after)
                made = made + 1
                if made == _KICKS:
                    break
        if found is not None:
            self.seen.add(hash(found[0]))
        return found

    def _order(self, rank: int, row: Row) -> Order:
        ops = (FORWARD, INPUT_GRAD if self.shop.split else BACKWARD, WEIGHT_GRAD)
        line = self.shop.numbered(rank, row)
        count = self.shop.count
        return [instruction(ops[t % 3], t // 3, number % count) for t, number in zip(row, line, strict=True)]

    def _step(self, rows: Rows, timing: _Timing) -> tuple[Rows, _Timing] | None:
        """The best move to rows that were not seen before; of equal moves, the first."""
        moves = []
        for i, (rank, row, low, high) in enumerate(self._moves(rows, timing)):
            moves.append((self._judged(rank, row, low, high, timing), i, rank, row))
        for _, _, rank, row in sorted(moves):
            new = (*rows[:rank], row, *rows[rank + 1 :])
            mark = hash(new)
            if mark in self.seen:
                continue
            self.seen.add(mark)
            self.work += len(row)
            if not self.shop.keeps_to_limits(rank, row):
                continue
            after = self.shop.timed(new)
            self.work += 3 * self.size
            if after is not None:
                return new, after
        return None

    def _judged(self, rank: int, row: Row, low: int, high: int, timing: _Timing) -> float:
        """The longest path through the operations ``low`` to ``high`` of the new row, if nothing else changed."""
        shop = self.shop
        line = self.shop.numbered(rank, row[: high + 1])[low:]
        old = timing.lines[rank]
        self.work += 2 * len(line) + high // 4
        now = timing.starts[old[low - 1]] + shop.times[old[low - 1]] if low else 0.0
        ends = []
        for number in line:
            need = shop.needs[number]
            if need >= 0:
                now = max(now, timing.arrivals[need])
            now += shop.times[number]
            ends.append(now)
        left = shop.times[old[high + 1]] + timing.tails[old[high + 1]] if high + 1 < len(old) else 0.0
        longest = 0.0
        for number, end in zip(reversed(line), reversed(ends), strict=True):
            left = max(left, shop.tail_by_user(number, timing.tails))
            longest = max(longest, end + left)
            left += shop.times[number]
        return longest

    def _moves(self, rows: Rows, timing: _Timing) -> Iterator[tuple[int, Row, int, int]]:
        """Moves of tokens within the blocks of the critical path: (rank, its new row, first and last changed place).

        The first token of each kind in a block goes to the block's start, and the last one to its end. The block's
        first and last token go to the places of these tokens.
        """
        for rank, low, high in self._blocks(timing):
            row = rows[rank]
            lasts = {token: i for i, token in enumerate(row[low : high + 1], low)}
            firsts = {row[i]: i for i in range(high, low - 1, -1)}
            moves = {(i, low) for i in firsts.values()} | {(i, high) for i in lasts.values()}
            moves |= {(end, i) for i in (*firsts.values(), *lasts.values()) for end in (low, high)}
            for source, target in sorted(moves):
                if source == target or row[source] == row[target]:
                    continue
                new = list(row)
                new.insert(target, new.pop(source))
                yield rank, tuple(new), min(source, target), max(source, target)

    def _blocks(self, timing: _Timing) -> Iterator[tuple[int, int, int]]:
        """(rank, first and last place) of the blocks of one critical path, from its end."""
        places = {number: (rank, i) for rank, line in enumerate(timing.lines) for i, number in enumerate(line)}
        shop = self.shop
        starts = timing.starts
        number = max(places, key=lambda n: starts[n] + shop.times[n])
        while True:
            rank, high = places[number]
            line = timing.lines[rank]
            low = high
            while low and starts[line[low - 1]] + shop.times[line[low - 1]] >= starts[line[low]] - _CLOSE:
                low -= 1
            if high > low:
                yield rank, low, high
            need = shop.needs[line[low]]
            if starts[line[low]] <= _CLOSE or need < 0:
                return
            number = need
