"""A checker of plans that uses nothing of the package. It reads a plan as JSON, and runs it on GPUs with one hardware
queue each (``CUDA_DEVICE_MAX_CONNECTIONS=1``).

The commands of a rank enter its queue in order. A transfer leaves the queue when the one before it on its communicator
is over. It is over when its peer's transfer has left too. A wait leaves when the operation for which it waits is over.
Compute always leaves. A batch is one operation. Commands that remain in a queue at the end wait forever.

In two further modes instructions also wait until everything that their rank has posted is over, as the first launch of
a kernel does. With ``operations`` these are compute and synchronisation, with ``instructions`` all instructions.

As a script: ``python queue_judge.py PLAN.json [operations | instructions]``. It prints a line for each fault, and then
exits with 1.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
Key = tuple[Any, ...]
COLLECTIVES = ("BROADCAST", "ALL_REDUCE", "REDUCE")
OPERATIONS, INSTRUCTIONS = "operations", "instructions"


class Operation:
    """An operation that a rank posts: transfers, or its part of a collective. ``open``: how many of them are not
    over."""

    def __init__(self, rank: int, members: list[Json], communicator: Key) -> None:
        self.rank = rank
        self.members = members
        self.communicator = communicator
        self.open = len(members)


class Judge:
    """Runs a plan. ``waiting``: which instructions also wait for all that their rank has posted: OPERATIONS,
    INSTRUCTIONS or none ("")."""

    def __init__(self, plan: Json, waiting: str = "") -> None:
        if waiting not in ("", OPERATIONS, INSTRUCTIONS):
            raise ValueError(f"waiting is {OPERATIONS!r}, {INSTRUCTIONS!r} or '', not {waiting!r}")
        self.waiting = waiting
        self.programs: list[deque[Json]] = [deque(_flat(program)) for program in plan["programs"]]
        self.ranks = len(self.programs)
        self.posted: list[dict[Key, Operation]] = [{} for _ in self.programs]
        self.unfinished: list[list[Operation]] = [[] for _ in self.programs]
        self.last: dict[Key, Operation] = {}  # by rank and communicator
        # Ends that have not met their peer.
        self.begun: defaultdict[Key, deque[tuple[Operation, Json]]] = defaultdict(deque)
        self.faults: list[str] = []

    def judge(self) -> list[str]:
        """The faults as texts; empty if the plan runs to its end."""
        while any(self._advance(rank) for rank in range(self.ranks)):
            """Runs until no queue moves."""
        self.faults += [f"rank {rank} hangs at {_text(left[0])}" for rank, left in enumerate(self.programs) if left]
        self.faults += [
            f"no rank meets {_text(one)} of rank {at.rank}" for ends in self.begun.values() for at, one in ends
        ]
        return self.faults

    def _advance(self, rank: int) -> bool:
        """Advance the queue of ``rank``. Returns whether a command has left it."""
        queue = self.programs[rank]
        before = len(self.programs[rank])
        while queue and self._leaves(rank, queue[0]):
            queue.popleft()
        return len(queue) < before

    def _leaves(self, rank: int, at: Json) -> bool:
        what, _, kind = at["op"].partition("_")
        if self._waits(at):
            self.unfinished[rank] = [one for one in self.unfinished[rank] if one.open]
            if self.unfinished[rank]:
                return False
        if at["op"] == "BATCH":
            return self._begin(Operation(rank, at["members"], ("group",)))
        if what in ("SEND", "RECV"):
            ends = (rank, at["peer"]) if what == "SEND" else (at["peer"], rank)
            return self._begin(Operation(rank, [at], ("channel", *ends, kind)))
        if at["op"] in COLLECTIVES:
            return self._begin(Operation(rank, [at], ("collectives",)))
        awaited = {"WAIT_F": "RECV_F", "WAIT_B": "RECV_B", "FREE_F": "SEND_F", "FREE_B": "SEND_B"}.get(at["op"])
        awaited = awaited or (kind if kind in COLLECTIVES else None)
        if awaited is None:
            return True
        operation = self.posted[rank].get(_key({**at, "op": awaited}))
        if operation is None:
            self.faults.append(f"rank {rank} has not posted what {_text(at)} waits for")
            return True
        return operation.open == 0

    def _waits(self, at: Json) -> bool:
        """Whether ``at`` waits for all that its rank has posted."""
        if self.waiting == OPERATIONS:
            transfers = at["op"] == "BATCH" or at["op"] in COLLECTIVES
            return not transfers and not at["op"].startswith(("SEND_", "RECV_", "WAIT_", "FREE_"))
        return self.waiting == INSTRUCTIONS

    def _begin(self, operation: Operation) -> bool:
        before = self.last.get((operation.rank, operation.communicator))
        if before is not None and before.open:
            return False
        self.last[operation.rank, operation.communicator] = operation
        self.unfinished[operation.rank].append(operation)
        for at in operation.members:
            self.posted[operation.rank][_key(at)] = operation
            if at["op"] in COLLECTIVES:
                self._gather(operation, at)
            else:
                self._match(operation, at)
        return True

    def _match(self, operation: Operation, at: Json) -> None:
        """Match the two ends of a direction of a communicator, in the order in which they begin."""
        is_send = at["op"].startswith("SEND")
        source, target = (operation.rank, at["peer"]) if is_send else (at["peer"], operation.rank)
        here, there = ((operation.communicator, source, target, side) for side in (is_send, not is_send))
        if not self.begun[there]:
            self.begun[here].append((operation, at))
            return
        peer, other = self.begun[there].popleft()
        operation.open -= 1
        peer.open -= 1
        send, receive = (at, other) if is_send else (other, at)
        step = 1 if send["op"] == "SEND_F" else -1
        expected = {**send, "op": send["op"].replace("SEND", "RECV"), "stage": send["stage"] + step}
        if _key(expected)[:4] != _key(receive)[:4]:
            self.faults.append(f"{_text(send)} of rank {source} is received as {_text(receive)}")

    def _gather(self, operation: Operation, at: Json) -> None:
        """End a collective if every rank has begun its part."""
        parts = self.begun["collective", _key({**at, "stage": None})]
        parts.append((operation, at))
        if len(parts) == self.ranks:
            for one, _ in parts:
                one.open -= 1
            parts.clear()


def _flat(program: list[Json]) -> Iterator[Json]:
    """The instructions, with the two halves of a pair one after the other, as they are issued."""
    for at in program:
        yield from at["members"] if at["op"] == "PAIR" else [at]


def _key(at: Json) -> Key:
    return at["op"], at["mb"], at["stage"], at.get("slice"), at.get("tensor")


def _text(at: Json) -> str:
    if at["op"] == "BATCH":
        return f"a batch of {', '.join(map(_text, at['members']))}"
    return f"{at['op']} of stage {at['stage']}, microbatch {at['mb']}"


def main(path: str, waiting: str = "") -> int:
    with open(path, encoding="utf-8") as file:
        faults = Judge(json.load(file), waiting).judge()
    print("\n".join(faults) or "no fault")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
