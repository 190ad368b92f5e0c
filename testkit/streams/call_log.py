"""What the hosts of virtual devices asked of them, call by call, for readers that know nothing of this package.

A file (``CallLog.write``) has one JSON object a line. Each rank has a host and streams, which are numbered together
over all ranks; a host counts as a stream, whose operations the host runs itself. What a rank issues stands in the order
of issue. A stream runs in that order too, and each command after the last wait or operation of its rank's host before
it. Nothing else is in order but for events. ``do`` says what a line is:

``format``    the first line. ``name``: FORMAT; ``version``: 1
``stream``    a new one. ``rank``, ``stream``: its number, ``name``, ``host``: whether it is the host of the rank
``begin``     ``rank`` enters a range called ``name``: an instruction of the engine, or an NVTX range of the user
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
    """The records of one network, in memory. ``keeps``: False drops all."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.records: list[dict[str, Any]] = [{"do": "format", "name": FORMAT, "version": VERSION}]
        self._open: dict[int, dict[str, Any]] = {}  # by rank: a launch or post, before which it may still allocate
        self._addresses: dict[Any, int] = {}
        self._used: defaultdict[int, int] = defaultdict(lambda: _ALIGNED)  # by rank: the first address that is new
        self._events: Iterator[int] = itertools.count(1)

    def write(self, path: Path) -> None:
        """To the file ``path``; see above."""
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
        """``block``: the memory, one object for as long as it keeps its address."""
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
        """Until ``issued``: ``access`` says what it uses, and what is added meanwhile comes before it."""
        if self.keeps:
            self._open[rank] = {"do": "launch", "stream": stream, "what": what, "reads": [], "writes": []}

    def access(self, rank: int, block: Any, start: int, stop: int, writes: bool) -> None:
        """What ``rank`` launches or posts uses the bytes ``start`` to ``stop`` of ``block``."""
        if self.keeps:
            place = [self._addresses[block] + start, stop - start]
            self._open[rank]["writes" if writes else "reads"].append(place)

    def issued(self, rank: int) -> None:
        """What ``rank`` launches or posts is on its stream."""
        if self.keeps:
            self.records.append(self._open.pop(rank))

    def record(self, stream: int) -> int:
        """The number of the event."""
        event = next(self._events)
        self._add(do="record", stream=stream, event=event)
        return event

    def wait(self, stream: int, event: int) -> None:
        self._add(do="wait", stream=stream, event=event)

    def post(self, rank: int, stream: int, after: int, what: str, ends: int) -> int:
        """As ``launch``. Returns the number of the event."""
        self.launch(rank, stream, what)
        event = next(self._events)
        if self.keeps:
            self._open[rank] |= {"do": "post", "after": after, "event": event, "ends": ends}
        return event

    def match(self, send: int, receive: int, ranks: tuple[int, int], nbytes: int, buffered: bool) -> None:
        """``ranks``: source and target."""
        source, target = ranks
        ends = {"send": send, "receive": receive, "source": source, "target": target}
        self._add(do="match", **ends, bytes=nbytes, buffered=buffered)

    def _add(self, **record: Any) -> None:
        if self.keeps:
            self.records.append(record)
