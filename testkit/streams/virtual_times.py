"""The times at which virtual devices run their operations: a timeline of each stream, made from a log of calls and a
table of times.

An operation starts when the host has issued it, its stream has reached it, and the stream's waits are over. Issuing
takes no time. A host that waits continues when its wait is over. A transfer starts when both ends have begun. Transfers
take turns on the link between two ranks, as in ``plan/simulate``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import Any, NamedTuple

from megatron_pp.plan.costs.stage_costs import Network, StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import Plan

Durations = Mapping[tuple[int, str], float]
"""(rank, range) -> the total time of the operations that were launched in that range."""


class Operation(NamedTuple):
    """One operation of a stream that uses memory. ``within``: the range that gave it its time; empty: it took no
    time."""

    rank: int
    stream: int
    what: str
    within: str
    start: float
    end: float


class Moved(NamedTuple):
    """One transfer. ``start``: when it begins on the wire. ``end``: when it has arrived."""

    source: int
    target: int
    nbytes: int
    start: float
    end: float


class Timelines(NamedTuple):
    """Operations and transfers, each in the order of their starts."""

    operations: list[Operation]
    transfers: list[Moved]


def durations_of(plan: Plan, costs: StageCosts, beside: bool = False) -> Durations:
    """The times of the compute and copies of ``plan``. ``beside``: whether the halves of a pair run at the same time.
    Then each takes as long as both in turn, because they share one device."""
    costs = costs.placed(plan.placement)
    shares, of_mb = costs.of_parts(plan.spec.num_parts), costs.of_microbatches(plan.spec.num_microbatches)
    found: dict[tuple[int, str], float] = {}
    for rank, program in enumerate(plan.programs):
        for at in program:
            timed = [one for one in ins.operations(at) if one.op in ins.SINGLE_COMPUTE_OPS | ins.COPY_POST_OPS]
            times = [costs.of(one.op, one.stage) * shares[one.part] * of_mb[one.mb] for one in timed]
            for one, time in zip(timed, times, strict=True):
                found[rank, str(one)] = sum(times) if beside else time
    return found


def timelines(records: Iterable[Mapping[str, Any]], durations: Durations, network: Network) -> Timelines:
    """The timelines of ``CallLog.records``. The time of a range is shared evenly by its operations that use memory. An
    operation belongs to the innermost range that ``durations`` names. ``network`` gives links and latencies; sizes are
    those of the sent messages. Raises RuntimeError if an operation never ends."""
    graph = _Graph(durations)
    for record in records:
        graph.read(record)
    return graph.run(network)


class _Graph:
    """A graph of a stream's operations and of transfers. ``after``: the nodes that come after each node."""

    def __init__(self, durations: Durations) -> None:
        self.durations = durations
        self.after: list[list[int]] = []
        self.before: list[int] = []  # number of nodes for which each waits
        self.last: dict[int, int] = {}  # by stream
        self.rank_of: dict[int, int] = {}  # by stream
        self.host_of: dict[int, int] = {}  # by rank
        self.events: dict[int, int] = {}  # the node that ends it
        self.begun: dict[int, int] = {}  # by event of a post: the node that begins it
        self.open: defaultdict[int, list[tuple[str, list[int]]]] = defaultdict(list)  # by rank: ranges, launches
        self.ranges: list[tuple[int, str, list[int]]] = []
        self.launched: dict[int, tuple[int, str]] = {}  # stream, what
        self.posted: dict[int, tuple[int, str]] = {}  # by the node that ends it: stream, what
        self.moved: dict[int, tuple[int, int, int]] = {}  # source, target, bytes

    def read(self, record: Mapping[str, Any]) -> None:
        handler = getattr(self, f"_{record['do']}", None)
        if handler is not None:
            handler(record)

    def run(self, network: Network) -> Timelines:
        times = [0.0] * len(self.after)
        within = [""] * len(self.after)
        for rank, name, launches in self.ranges:
            for node in launches:
                times[node] = self.durations[rank, name] / len(launches)
                within[node] = name
        starts, ends = self._played(times, network)
        operations = [
            Operation(self.rank_of[stream], stream, what, within[node], starts[node], ends[node])
            for node, (stream, what) in self.launched.items()
        ]
        transfers = [Moved(*moved, starts[node], ends[node]) for node, moved in self.moved.items()]
        return Timelines(sorted(operations, key=_start), sorted(transfers, key=_start))

    def _played(self, times: list[float], network: Network) -> tuple[list[float], list[float]]:
        """The start and the end of each node."""
        ready = [0.0] * len(times)
        ends = [0.0] * len(times)
        left = list(self.before)
        free: defaultdict[tuple[int, int], float] = defaultdict(float)  # by link
        # At equal times, the one that came first.
        agenda = [(0.0, node, node) for node, count in enumerate(left) if not count]
        done = pushed = len(left)
        while agenda:
            now, _, node = heappop(agenda)
            done -= 1
            if node in self.moved:
                source, target, size = self.moved[node]
                link = network.between(source, target)
                ready[node] = max(now, free[source, target])
                free[source, target] = ready[node] + link.wire_time(size)
                ends[node] = free[source, target] + link.latency
            else:
                ends[node] = now + times[node]
            for then in self.after[node]:
                ready[then] = max(ready[then], ends[node])
                left[then] -= 1
                if not left[then]:
                    pushed += 1
                    heappush(agenda, (ready[then], pushed, then))
        if done:
            never = [f"{what} of rank {self.rank_of[at]}" for n, (at, what) in self.posted.items() if left[n]]
            raise RuntimeError(f"{done} of {len(times)} calls never end: the devices hang, first at the {never[0]}")
        return ready, ends

    def _node(self, *before: int | None) -> int:
        node = len(self.after)
        self.after.append([])
        self.before.append(0)
        for one in before:
            if one is not None:
                self._order(one, node)
        return node

    def _order(self, one: int, then: int) -> None:
        self.after[one].append(then)
        self.before[then] += 1

    def _issue(self, stream: int, *before: int | None) -> int:
        """Add the next node of ``stream``. Returns its number."""
        host = self.host_of[self.rank_of[stream]]
        self.last[stream] = node = self._node(self.last.get(stream), self.last.get(host), *before)
        return node

    # -- by what a record does -------------------------------------------------------------------------------------

    def _stream(self, record: Mapping[str, Any]) -> None:
        self.rank_of[record["stream"]] = record["rank"]
        if record["host"]:
            self.host_of[record["rank"]] = record["stream"]

    def _begin(self, record: Mapping[str, Any]) -> None:
        launches: list[int] = []
        self.open[record["rank"]].append((record["name"], launches))
        if (record["rank"], record["name"]) in self.durations:
            self.ranges.append((record["rank"], record["name"], launches))

    def _end(self, record: Mapping[str, Any]) -> None:
        self.open[record["rank"]].pop()

    def _launch(self, record: Mapping[str, Any]) -> None:
        stream = record["stream"]
        rank = self.rank_of[stream]
        node = self._issue(stream)
        if stream == self.host_of[rank] or not (record["reads"] or record["writes"]):
            return
        self.launched[node] = stream, record["what"]
        for name, launches in reversed(self.open[rank]):
            if (rank, name) in self.durations:
                launches.append(node)
                return

    def _record(self, record: Mapping[str, Any]) -> None:
        self.events[record["event"]] = self._issue(record["stream"])

    def _wait(self, record: Mapping[str, Any]) -> None:
        self._issue(record["stream"], self.events[record["event"]])

    def _post(self, record: Mapping[str, Any]) -> None:
        event, stream = record["event"], record["stream"]
        self.begun[event] = self._issue(stream, self.last.get(record["after"]))
        self.events[event] = done = self._issue(stream)
        self.before[done] += record["ends"]  # one for each match
        self.posted[done] = stream, record["what"]

    def _match(self, record: Mapping[str, Any]) -> None:
        ends = record["send"], record["receive"]
        node = self._node(*(self.begun[event] for event in ends))
        self.moved[node] = record["source"], record["target"], record["bytes"]
        for event in ends:
            if record["buffered"] and event == record["send"]:
                self.before[self.events[event]] -= 1
            else:
                self.after[node].append(self.events[event])  # counted when it was posted


def _start(one: Operation | Moved) -> float:
    return one.start
