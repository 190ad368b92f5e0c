"""Gathers a few numbers of each rank of a pipeline on one of the ranks, while steps go on.

A thread of each rank sends the numbers over the job's store, by a connection of its own. It uses no process group,
stream or message of the schedule. A rank hands its numbers to the thread and goes on, so no rank ever waits for another
one. If the store is slow, numbers come late. If the store is gone, they are lost. Steps for which a rank has no
numbers, because the rank lags behind or has ended, are left out.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron_pp.comm.stores import private_client
from megatron_pp.comm.transport import Transport
from megatron_pp.common.finalizers import call_at_exit, call_if_alive, finalize_here
from megatron_pp.common.object_table import ObjectTable

logger = logging.getLogger("megatron_pp")

_KEPT = 8  # steps of a rank on the store, and steps that wait for the numbers of other ranks
# Seconds between looks for numbers of other ranks. They double while none come, from the first to the second.
_SOON = 0.1
_SELDOM = 5.0
_JOIN = 2.0

Rows = list[list[float]]
"""The numbers of each rank, by rank."""

_GATHERED: ObjectTable[RankNumbers] = ObjectTable()


def rank_numbers(transport: Transport, reads: bool) -> RankNumbers:
    """The numbers of the transport's pipeline. With ``reads`` this rank also reads the numbers of all ranks; otherwise
    it only gives its own."""
    found = _GATHERED.get(transport)
    if found is None:
        found = _GATHERED[transport] = RankNumbers(transport.store, transport.name, transport.rank, transport.size)
        finalize_here(transport, call_if_alive, weakref.WeakMethod(found.close))
    found.reads = found.reads or reads
    return found


class RankNumbers:
    """``store``: torch's, shared by the ranks of the pipeline ``name``, each of which makes one object of its own."""

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        self.reads = False
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._lock = threading.Condition()
        self._own: dict[str, list[float]] = {}  # what is on the store, or soon will be
        self._changed = False
        self._last = self._round = 0
        self._waiting: deque[str] = deque(maxlen=_KEPT)
        self._complete: deque[tuple[int, Rows]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def post(self, step: int, numbers: Sequence[float]) -> None:
        """Hand over this rank's numbers of a step. A step may have several calls, in the same order on all ranks."""
        with self._lock:
            self._round += step < self._last  # the program began again, at an earlier step
            self._last = step
            begins = f"{self._round}.{step}."
            key = f"{begins}{sum(key.startswith(begins) for key in self._own)}"
            self._own[key] = [float(number) for number in numbers]
            for old in [*self._own][:-_KEPT]:
                del self._own[old]
            if self._size == 1:
                self._complete.append((step, [self._own[key]]))
                return
            if self.reads:
                self._waiting.append(key)
            self._changed = True
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, daemon=True, name=f"megatron_pp numbers {self._rank}")
                self._thread.start()
                call_at_exit(self.close)
            self._lock.notify_all()

    def take(self) -> list[tuple[int, Rows]]:
        """The steps whose numbers have come from every rank since the last call. Does not wait for others."""
        with self._lock:
            found = [*self._complete]
            self._complete.clear()
        return found

    def close(self) -> None:
        """End the thread. A thread that is stuck in a call on the store ends when that call or the process ends."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN)

    def _run(self) -> None:
        try:
            client = private_client(self._store)
            nth = client.add(f"megatron_pp/numbers {self._name}/{self._rank}", 1)
            keys = [f"megatron_pp/numbers {nth} of {self._name}/{rank}" for rank in range(self._size)]
            pause = _SOON
            while not self._closed:
                if self._send(client, keys[self._rank]):
                    pause = _SOON
                if self._waiting and self._read(client, keys):
                    pause = _SOON
                with self._lock:
                    if not (self._changed or self._closed):
                        self._lock.wait(pause if self._waiting else None)
                pause = min(2 * pause, _SELDOM)
            self._send(client, keys[self._rank])
        except Exception as error:  # whatever the store's client raises when its server is gone
            if not self._closed:
                logger.warning("numbers of metrics are lost from now on: the job's store failed: %s", error)
            self._closed = True

    def _send(self, client: Any, key: str) -> bool:
        """Send the numbers that wait. Returns whether there were any."""
        with self._lock:
            changed, self._changed = self._changed, False
            text = json.dumps(self._own)
        if changed:
            client.set(key, text)
        return changed

    def _read(self, client: Any, keys: Sequence[str]) -> bool:
        """Read numbers of other ranks. Returns whether a step became complete. It gets the keys only if all of them
        exist, because a ``get`` of a missing key would wait."""
        if not client.check([*keys]):
            return False
        found = [json.loads(client.get(key)) for key in keys]
        with self._lock:
            ready = [key for key in self._waiting if all(key in one for one in found)]
            for key in ready:
                self._waiting.remove(key)
                self._complete.append((int(key.split(".")[1]), [one[key] for one in found]))
        return bool(ready)
