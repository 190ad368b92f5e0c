"""A log of the calls from hosts to virtual devices, for readers that use nothing of this package.

A file (``CallLog.write``) has one JSON object in each line. Each rank has a host and streams, which are numbered
together over all ranks. A host counts as a stream, whose operations the host runs itself. Commands of a rank are in the
order of issue. A stream runs its commands in that order, and each of them after the last earlier wait or operation of
its rank's host. All other order is by events. ``do`` is the kind of a line:

``format``    the first line. ``name``: FORMAT; ``version``: 1
``stream``    a new one. ``rank``, ``stream``: its number, ``name``, ``host``: whether it is the host of the rank
``begin``     ``rank`` enters the range ``name``: an instruction of the engine, or an NVTX range of the user
``end``       ``rank`` leaves the range that it entered last
``allocate``  ``rank`` has ``bytes`` at ``address`` for what runs on ``stream`` next. Each rank has addresses of its own
``free``      ``rank`` gives the memory at ``address`` back: the next allocation for the same stream may have it at once
``record_stream``  once ``rank`` gives the memory at ``address`` back, it stays until what is on ``stream`` then is over
``launch``    an operation on ``stream``. ``what``: its name in ATen; ``reads``, ``writes``: lists of [address, bytes]
``record``    ``event`` is over when all that is on ``stream`` so far is
``wait``      what comes on ``stream`` next waits for ``event``
``post``      sends or receives that are one operation: it runs on ``stream``, after what is on stream ``after`` so far.
              ``event`` is over when it is; ``ends``: how many sends and receives; ``what``, ``reads``, ``writes``
``match``     a send of the post with event ``send`` meets a receive of that with event ``receive``. ``source``,
              ``target``: ranks; ``bytes``. A post is over when it has begun and the posts that its ends meet; with
              ``buffered`` the send does not wait for the receive
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT, VERSION = "calls of virtual devices", 1
_ALIGNED = 512


class CallLog:
    """The records of one network, in memory. With ``keeps`` False it drops all records."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.records: list[dict[str, Any]] = [{"do": "format", "name": FORMAT, "version": VERSION}]
        # By rank: a launch or post that is not issued yet; allocations may still come before it.
        self._open: dict[int, dict[str, Any]] = {}
        self._addresses: dict[Any, int] = {}
        self._used: defaultdict[int, int] = defaultdict(lambda: _ALIGNED)  # by rank: the first unused address
        self._events: Iterator[int] = itertools.count(1)

    def write(self, path: Path) -> None:
        """Write the records to the file ``path``, in the format above."""
        with open(path, "w") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in self.records)

    # -- what devices call -----------------------------------------------------------------------------------------

    def stream(self, rank: int, number: int, name: str, host: bool = False) -> None:
        self._add(do="stream", rank=rank, stream=number, name=name, host=host)

    def begin(self, rank: int, name: str) -> None:
        self._add(do="begin", rank=rank, name=name)

    def end(self, rank: int) -> None:
        self._add(do="end", rank=rank)

    def allocate(self, rank: int, block: Any, nbytes: int, stream: int) -> None:
        """Record an allocation. ``block`` is the memory: the same object as long as it has this address."""
        if self.keeps:
            if block not in self._addresses:
                self._addresses[block] = self._used[rank]
                self._used[rank] += -(-max(nbytes, block.nbytes) // _ALIGNED) * _ALIGNED
            address = self._addresses[block]
            self._add(do="allocate", rank=rank, address=address, bytes=nbytes, stream=stream)

    def free(self, rank: int, block: Any) -> None:
        if self.keeps:
            self._add(do="free", rank=rank, address=self._addresses[block])

    def record_stream(self, rank: int, block: Any, stream: int) -> None:
        if self.keeps:
            self._add(do="record_stream", rank=rank, address=self._addresses[block], stream=stream)

    def launch(self, rank: int, stream: int, what: str) -> None:
        """Begin a launch, which ``issued`` ends. In between ``access`` adds the memory that it uses, and other records
        come before it."""
        if self.keeps:
            self._open[rank] = {"do": "launch", "stream": stream, "what": what, "reads": [], "writes": []}

    def access(self, rank: int, block: Any, start: int, stop: int, writes: bool) -> None:
        """Add that the launch or post of ``rank`` uses the bytes ``start`` to ``stop`` of ``block``."""
        if self.keeps:
            place = [self._addresses[block] + start, stop - start]
            self._open[rank]["writes" if writes else "reads"].append(place)

    def issued(self, rank: int) -> None:
        """End the launch or post of ``rank``: it is on its stream."""
        if self.keeps:
            self.records.append(self._open.pop(rank))

    def record(self, stream: int) -> int:
        """Record an event on ``stream``. Returns its number."""
        event = next(self._events)
        self._add(do="record", stream=stream, event=event)
        return event

    def wait(self, stream: int, event: int) -> None:
        self._add(do="wait", stream=stream, event=event)

    def post(self, rank: int, stream: int, after: int, what: str, ends: int) -> int:
        """Begin a post, as ``launch`` does. Returns the number of its event."""
        self.launch(rank, stream, what)
        event = next(self._events)
        if self.keeps:
            self._open[rank] |= {"do": "post", "after": after, "event": event, "ends": ends}
        return event

    def match(self, send: int, receive: int, ranks: tuple[int, int], nbytes: int, buffered: bool) -> None:
        """Record that a send meets a receive. ``ranks``: source and target."""
        source, target = ranks
        ends = {"send": send, "receive": receive, "source": source, "target": target}
        self._add(do="match", **ends, bytes=nbytes, buffered=buffered)

    def _add(self, **record: Any) -> None:
        if self.keeps:
            self.records.append(record)
