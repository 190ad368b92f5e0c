"""Finds orders of compute on a graph of model chunks, such that chunks of one rank run in the bubbles of each other.

Candidates are list schedules: whenever a rank is free it starts the operation that can start first, and of several the
one with the highest priority. Candidates differ in the priorities, and in the number of forwards that encoders may run
ahead. One of them has all encoders' forwards first and all their backwards last. The shortest candidate is then
improved by moves of single operations. No choice depends on the machine's clock, because every rank searches for
itself.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import islice, permutations, product
from random import Random

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD

Node = tuple[int, int]  # rank, chunk
_Choice = tuple[float, int, int, str, Node]  # start, priority, rank, op, node
Row = tuple[tuple[str, int, int], ...]  # of one rank: (op, chunk, microbatch)

_LISTED = 50_000  # operations of all list schedules together
_OPERATIONS = 500_000  # looked at in all moves together
_MOVES = 6000
_CLOSE = 1e-9


class GraphOrders:
    """The search. ``times``: the times of each node's forward and backward. ``needs``: op -> node -> the nodes whose
    result of that op it needs. ``fed``: the nodes that take another module's output; nodes that are neither fed nor
    behind such a node belong to encoders. Raises PlanError for nodes that need each other.
    """

    def __init__(
        self,
        times: Mapping[Node, tuple[float, float]],
        needs: Mapping[str, Mapping[Node, Sequence[Node]]],
        num_microbatches: int,
        fed: Container[Node],
        forward_only: bool = False,
    ) -> None:
        self.needs = needs
        self.count = num_microbatches
        self.times = {(op, node): took[k] for node, took in times.items() for k, op in enumerate((FORWARD, BACKWARD))}
        self.ops = (FORWARD,) if forward_only else (FORWARD, BACKWARD)
        self.operations = len(times) * num_microbatches * len(self.ops)
        self.ranks = [[node for node in times if node[0] == rank] for rank in range(1 + max(times)[0])]
        self.users: dict[str, dict[Node, list[Node]]] = {op: {node: [] for node in times} for op in self.ops}
        for op in self.ops:
            for node, sources in needs[op].items():
                for source in sources:
                    self.users[op][source].append(node)
        # Stages from a node to the end along the longest way: as many forwards of it are in flight, in 1F1B.
        self.behind: dict[Node, int] = {}
        for node in _in_order(needs[BACKWARD]):
            self.behind[node] = 1 + max((self.behind[user] for user in needs[BACKWARD][node]), default=0)
        self.early: set[Node] = set()
        for node in _in_order(needs[FORWARD]):
            if node not in fed and self.early.issuperset(needs[FORWARD][node]):
                self.early.add(node)

    def best(self) -> list[Row]:
        """The rows of the shortest step that the search finds."""
        found: list[tuple[float, int, list[Row]]] = []
        for priorities, ahead in islice(product(_priorities(), self._limits()), max(12, _LISTED // self.operations)):
            rows = self._listed(priorities, ahead)
            length = self.length(rows)
            if length is not None:
                found.append((length, ahead, rows))
        length, ahead, rows = min(found, key=lambda one: (round(one[0], 6), one[1]))
        return self._improved(rows, length, ahead)

    def _limits(self) -> list[int]:
        """The numbers of forwards that encoders may run ahead: as in 1F1B, and larger by powers of two, up to all."""
        found = []
        limit = max(self.behind.values())
        while limit < self.count:
            found.append(limit)
            limit *= 2
        return [*found, self.count]

    def _limit(self, node: Node, ahead: int) -> int:
        return ahead if node in self.early else self.behind[node]

    def _listed(self, priorities: Mapping[tuple[bool, str], int], ahead: int) -> list[Row]:
        """The list schedule. Its rows are incomplete if the limits stop it."""
        done: dict[tuple[str, Node, int], float] = {}
        free = [0.0] * len(self.ranks)
        upcoming = {(op, node): 0 for row in self.ranks for node in row for op in self.ops}
        rows: list[list[tuple[str, int, int]]] = [[] for _ in self.ranks]
        choices: dict[int, _Choice] = {}  # rank -> its best choice
        changed = set(range(len(self.ranks)))
        while True:
            for rank in changed:
                choices.pop(rank, None)
                found = []
                for op, node in ((op, node) for node in self.ranks[rank] for op in self.ops):
                    ready = self._ready(op, node, upcoming, done, ahead)
                    if ready is not None:
                        start = max(ready, free[rank])
                        found.append((start, priorities[node in self.early, op], rank, op, node))
                if found:
                    choices[rank] = min(found)
            if not choices:
                return [tuple(row) for row in rows]
            start, _, rank, op, node = min(choices.values())
            mb = upcoming[op, node]
            upcoming[op, node] += 1
            free[rank] = done[op, node, mb] = start + self.times[op, node]
            rows[rank].append((op, node[1], mb))
            changed = {rank, *(user for user, _ in self.users[op][node])}

    def _ready(
        self,
        op: str,
        node: Node,
        upcoming: Mapping[tuple[str, Node], int],
        done: Mapping[tuple[str, Node, int], float],
        ahead: int,
    ) -> float | None:
        """The time at which the next ``op`` of ``node`` may start; None if that is not known yet."""
        mb = upcoming[op, node]
        if mb == self.count:
            return None
        if op == FORWARD and BACKWARD in self.ops and mb - upcoming[BACKWARD, node] >= self._limit(node, ahead):
            return None
        ends = [done.get(one) for one in self._needed(op, node, mb)]
        return max((end for end in ends if end is not None), default=0.0) if None not in ends else None

    def _needed(self, op: str, node: Node, mb: int) -> Iterator[tuple[str, Node, int]]:
        for source in self.needs[op][node]:
            yield op, source, mb
        if op == BACKWARD:
            yield FORWARD, node, mb

    def length(self, rows: Sequence[Row]) -> float | None:
        """The time of a step with these rows; None if it does not reach its end."""
        done: dict[tuple[str, Node, int], float] = {}
        position = [0] * len(rows)
        free = [0.0] * len(rows)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while position[rank] < len(row):
                    op, chunk, mb = row[position[rank]]
                    ends = [done.get(one) for one in self._needed(op, (rank, chunk), mb)]
                    if None in ends:
                        break
                    free[rank] = max([free[rank], *(end for end in ends if end is not None)])
                    free[rank] += self.times[op, (rank, chunk)]
                    done[op, (rank, chunk), mb] = free[rank]
                    position[rank] += 1
                    moved = True
        return max(free) if len(done) == self.operations else None

    def _improved(self, rows: list[Row], length: float, ahead: int) -> list[Row]:
        """Moves single operations to other places while the step does not get longer."""
        random = Random(0)
        for _ in range(min(_MOVES, _OPERATIONS // self.operations)):
            rank = random.randrange(len(rows))
            row = rows[rank]
            source = random.randrange(len(row))
            far = 1 << random.randrange(5)
            target = min(max(source + random.choice((-far, far)), 0), len(row) - 1)
            moved = [*row[:source], *row[source + 1 :]]
            moved.insert(target, row[source])
            if not self._keeps(rank, moved, ahead):
                continue
            changed = [*rows[:rank], tuple(moved), *rows[rank + 1 :]]
            found = self.length(changed)
            if found is not None and found <= length + _CLOSE:
                rows = changed
                length = found
        return rows

    def _keeps(self, rank: int, row: Sequence[tuple[str, int, int]], ahead: int) -> bool:
        """Whether microbatches of an operation stay in their order, and forwards within their limit."""
        upcoming = dict.fromkeys(((op, node[1]) for node in self.ranks[rank] for op in self.ops), 0)
        for op, chunk, mb in row:
            if upcoming[op, chunk] != mb:
                return False
            upcoming[op, chunk] += 1
            in_flight = mb + 1 - upcoming.get((BACKWARD, chunk), 0)
            if op == FORWARD and BACKWARD in self.ops and in_flight > self._limit((rank, chunk), ahead):
                return False
        return True


def _in_order(needs: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    try:
        yield from TopologicalSorter(needs).static_order()
    except CycleError as error:
        rank, chunk = error.args[1][0]
        raise PlanError(
            f"chunk {chunk} of rank {rank} waits for itself: modules wait for each other in a circle"
        ) from error


def _priorities() -> Iterator[dict[tuple[bool, str], int]]:
    """By (whether of an encoder, op)."""
    for order in permutations([(False, BACKWARD), (False, FORWARD), (True, FORWARD), (True, BACKWARD)]):
        if order.index((False, BACKWARD)) < order.index((False, FORWARD)):
            yield {kind: k for k, kind in enumerate(order)}
