"""A checker of stream races that uses nothing of the package under test. It reads a log of calls, and reports faults.

    python stream_judge.py CALLS.jsonl

The format is that of ``testkit/streams/call_log.py``. One operation happens before another if the second can be reached
from the first in a graph. The nodes are the streams' operations. The edges are the order of each stream, the waits of
the host before it issued a command, events, and the matches of transfers. The checker reports

* two accesses to the same bytes, one of them a write, if neither can be reached from the other; * freed memory that may
still be in use at the next allocation for its stream, which may get it; * impossible calls: uses of memory that is not
allocated, two allocations at one place, waits for events that were never recorded, memory that is freed twice; *
devices that wait for each other forever.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Record = Mapping[str, Any]
Place = tuple[int, int]  # rank, address


class Access(NamedTuple):
    """An access. ``start``, ``stop``: addresses. ``first``, ``last``: the nodes between which it happens. For a free
    both are one node, which comes only after operations that may still use the memory."""

    start: int
    stop: int
    writes: bool
    first: int
    last: int
    words: str
    gives_back: bool = False


class Judge:
    """``judge`` takes the records of a log in order, and returns the faults as texts."""

    def __init__(self) -> None:
        self.before: list[list[int]] = []  # by node: the nodes right before it
        self.last: dict[int, int] = {}  # by stream
        self.rank_of: dict[int, int] = {}  # by stream
        self.name_of: dict[int, str] = {}  # by stream
        self.host_of: dict[int, int] = {}  # by rank
        self.events: dict[int, int] = {}  # by event: the node that ends it
        self.begun: dict[int, int] = {}  # by event of a post: the node that begins it
        self.read: dict[int, int] = {}  # by event of a single post: the node at which a send has read its bytes
        self.missing: dict[int, int] = {}  # by event of a post: matches that are still missing
        self.ranges: defaultdict[int, list[str]] = defaultdict(list)  # by rank
        self.live: dict[Place, tuple[int, int]] = {}  # end of the memory, stream that it was allocated for
        self.starts: defaultdict[int, list[int]] = defaultdict(list)  # by rank: addresses of ``live``, sorted
        self.users: defaultdict[Place, set[int]] = defaultdict(set)  # streams named by record_stream
        # By stream: memory that was freed since the last allocation for it, with the nodes for which it is kept.
        self.given_back: defaultdict[int, list[tuple[Place, int, str, list[int | None]]]] = defaultdict(list)
        self.uses: defaultdict[Place, list[Access]] = defaultdict(list)
        self.faults: list[str] = []

    def judge(self, records: Iterable[Record]) -> list[str]:
        for record in records:
            getattr(self, f"_{record['do']}")(record)
        reached = self._reached()
        if any(self.missing.values()) or reached is None:
            self.faults.append("the devices wait for each other forever")
        else:
            for (rank, _), uses in sorted(self.uses.items()):
                self._compare(rank, uses, reached)
        return list(dict.fromkeys(self.faults))

    # -- the order of operations -----------------------------------------------------------------------------------

    def _reached(self) -> list[int] | None:
        """By node: the bits of itself and of all nodes before it. None if the graph has a cycle."""
        after: list[list[int]] = [[] for _ in self.before]
        left = [len(nodes) for nodes in self.before]
        for node, nodes in enumerate(self.before):
            for one in nodes:
                after[one].append(node)
        reached = [0] * len(left)
        ready = [node for node, count in enumerate(left) if not count]
        for node in ready:
            reached[node] |= 1 << node
            for then in after[node]:
                reached[then] |= reached[node]
                left[then] -= 1
                if not left[then]:
                    ready.append(then)
        return reached if len(ready) == len(left) else None

    def _node(self, *before: int | None) -> int:
        self.before.append([node for node in before if node is not None])
        return len(self.before) - 1

    def _issue(self, stream: int, *before: int | None) -> int:
        """Add the next node of ``stream``. Returns its number."""
        host = self.host_of[self.rank_of[stream]]
        self.last[stream] = self._node(self.last.get(stream), self.last.get(host), *before)
        return self.last[stream]

    # -- memory ----------------------------------------------------------------------------------------------------

    def _where(self, rank: int) -> str:
        return f" in {self.ranges[rank][-1]}" if self.ranges[rank] else ""

    def _use(self, record: Record, first: int, read: int, last: int) -> None:
        """Record the accesses of an operation between the nodes ``first`` and ``last``. At ``read`` it has done its
        reads."""
        rank = self.rank_of[record["stream"]]
        words = f"{record['what']}{self._where(rank)} ({self.name_of[record['stream']]})"
        for writes, places in enumerate((record["reads"], record["writes"])):
            for start, size in places:
                at = bisect_right(self.starts[rank], start) - 1
                place = (rank, self.starts[rank][at])
                if at < 0 or start + size > self.live[place][0]:
                    self.faults.append(f"rank {rank}: {words} uses {size} bytes at {start}, which it does not have")
                else:
                    over = last if writes else read
                    self.uses[place].append(Access(start, start + size, bool(writes), first, over, words))

    def _compare(self, rank: int, uses: list[Access], reached: list[int]) -> None:
        """Compare ``uses``, the accesses to one place in the order of issue."""
        kept: list[Access] = []
        for use in uses:
            rest = []
            for one in kept:
                in_order = reached[use.first] >> one.last & 1
                overlap = one.start < use.stop and use.start < one.stop and (one.writes or use.writes)
                if overlap and not in_order and not reached[one.first] >> use.last & 1:
                    self.faults.append(f"rank {rank}: {one.words} and {use.words} use the same memory in no order")
                # A later write covers this access and comes after it, so later accesses are compared with that write.
                covered = use.start <= one.start and one.stop <= use.stop and use.writes and not use.gives_back
                if not (in_order and covered):
                    rest.append(one)
            kept = rest if use.gives_back else [*rest, use]

    # -- by kind of record -----------------------------------------------------------------------------------------

    def _format(self, record: Record) -> None:
        if (record["name"], record["version"]) != ("calls of virtual devices", 1):
            raise ValueError(f"this is not a log of calls, or one of another version: {record}")

    def _stream(self, record: Record) -> None:
        self.rank_of[record["stream"]], self.name_of[record["stream"]] = record["rank"], record["name"]
        if record["host"]:
            self.host_of[record["rank"]] = record["stream"]

    def _begin(self, record: Record) -> None:
        self.ranges[record["rank"]].append(record["name"])

    def _end(self, record: Record) -> None:
        self.ranges[record["rank"]].pop()

    def _allocate(self, record: Record) -> None:
        rank, start = record["rank"], record["address"]
        starts = self.starts[rank]
        stop = start + record["bytes"]
        at = bisect_right(starts, start)
        if (at and self.live[rank, starts[at - 1]][0] > start) or (at < len(starts) and starts[at] < stop):
            self.faults.append(f"rank {rank} has two things at {start}")
        insort(starts, start)
        self.live[rank, start] = stop, record["stream"]
        host = self.host_of[rank]
        stream = record["stream"]
        for place, end, words, before in self.given_back.pop(stream, ()):
            node = self._node(self.last.get(host), self.last.get(stream), *before)
            self.uses[place].append(Access(place[1], end, True, node, node, words, gives_back=True))

    def _record_stream(self, record: Record) -> None:
        self.users[record["rank"], record["address"]].add(record["stream"])

    def _free(self, record: Record) -> None:
        rank, start = place = record["rank"], record["address"]
        if place not in self.live:
            self.faults.append(f"rank {rank} gives back what it does not have, at {start}")
            return
        stop, stream = self.live.pop(place)
        self.starts[rank].remove(start)
        users = [self.last.get(one) for one in self.users.pop(place, ())]
        if stream != self.host_of[rank]:  # pinned memory is kept until its copies are over
            words = f"the next owner of what was given back{self._where(rank)}"
            self.given_back[stream].append((place, stop, words, users))

    def _launch(self, record: Record) -> None:
        node = self._issue(record["stream"])
        self._use(record, node, node, node)

    def _record(self, record: Record) -> None:
        self.events[record["event"]] = self._issue(record["stream"])

    def _wait(self, record: Record) -> None:
        if record["event"] not in self.events:
            self.faults.append(f"event {record['event']} is waited for and was never recorded")
        self._issue(record["stream"], self.events.get(record["event"]))

    def _post(self, record: Record) -> None:
        event = record["event"]
        self.begun[event] = self._issue(record["stream"], self.last.get(record["after"]))
        if record["ends"] == 1:
            self.read[event] = self._node(self.begun[event])
        self.events[event] = over = self._issue(record["stream"], self.read.get(event))
        self.missing[event] = record["ends"]
        self._use(record, self.begun[event], self.read.get(event, over), over)

    def _match(self, record: Record) -> None:
        send, receive = record["send"], record["receive"]
        for event in (send, receive):
            self.missing[event] -= 1
        if not record["buffered"]:
            self.before[self.read.get(send, self.events[send])].append(self.begun[receive])
        self.before[self.events[receive]].append(self.read.get(send, self.begun[send]))


def faults_in(path: Path) -> list[str]:
    """The faults in the log at ``path``."""
    with open(path) as file:
        return Judge().judge(json.loads(line) for line in file)


if __name__ == "__main__":
    found = faults_in(Path(sys.argv[1]))
    print("\n".join(found) or "no fault")
    sys.exit(bool(found))
