"""Networks that do their worst within the rules, for ranks as threads: what passes here has no race.

A real transport reads the bytes of a send some time between the rendezvous and the moment when the send is known to be
done, and mostly at a harmless one. These read at the worst one. They behave as a DMA engine does: they know where bytes
lie and keep nothing alive, so that a send whose memory was freed delivers NaN (and is noted in ``violations``); the
buffer of a receive holds NaN until the bytes have come.

``LastMomentNetwork``  reads only when the sender waits on the send, or when nothing else can move, or after everything
else is done
``PoisoningNetwork``   the same, and memory that only the communicator still holds counts as freed, and is filled with
NaN at once: an early release shows
                       although the handle owns the bytes
``ShuffledNetwork``    completes transfers at random moments, in any order that FIFO channels allow

Ranks take turns by the seed (``deterministic_threads.py``): a run repeats exactly, and a deadlock is noticed at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.testing.deterministic_threads import Turns
from megatron_pp.testing.memory_transport import End, MemoryNetwork, MemoryTransport, MemoryWork, Queue

_GARBAGE = 0x7F7F7F7F  # what freed memory holds where the dtype has no NaN


class Window:
    """Where the bytes of a tensor lie. Keeps nothing alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._offset = tensor.storage_offset()
        self._stride = tensor.stride()
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.held_by_others = self._holders() > 1

    def look(self) -> torch.Tensor | None:
        """The tensor that lies there, or None: the memory was freed."""
        storage = self._alive()
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, self._offset, self.shape, self._stride)

    def only_communicator_holds(self) -> bool:
        """Whether all but the communicator have let go of memory that others held when it was posted."""
        return self.held_by_others and self._holders() <= 1

    def _holders(self) -> int:
        storage = self._alive()
        return 0 if storage is None else torch._C._storage_Use_Count(storage._cdata) - 1  # less our own, right now

    def _alive(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)


class Pair(NamedTuple):
    """A send and a receive that have met; their bytes have not moved yet."""

    send: End
    receive: End


class HostileNetwork(MemoryNetwork):
    """What the hostile networks share: turns by seed, and transfers that are late. ``pollable``: works tell when they
    are complete, as on NCCL.
    """

    def __init__(self, size: int, one_way: bool = True, *, seed: int = 0, pollable: bool = False) -> None:
        super().__init__(size, one_way)
        self.pollable = pollable
        self.violations: list[str] = []
        self.transfers = 0
        self.rng = random.Random(seed)
        self._turns = Turns(size, self.rng, self._move_something)
        self._windows: dict[End, Window] = {}
        self._in_flight: list[Pair] = []
        self._awaited: set[MemoryWork] = set()
        self._running = size

    def transport(self, rank: int) -> MemoryTransport:
        transport = super().transport(rank)
        transport.pollable = self.pollable
        return transport

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        try:
            with self._turns.running(rank):
                try:
                    yield
                except BaseException as error:
                    self.abort(f"rank {rank}: {error}")
                    raise
        finally:
            self._running -= 1
            if self._running == 0:
                while self._in_flight:  # sends that nobody ever waited for
                    self._move(self._in_flight[0])

    def post(self, rank: int, queue: Queue, ends: list[End]) -> MemoryWork:
        for end in ends:
            self._forget_but_where(end)
        work = super().post(rank, queue, ends)
        self.after_event()
        if self.rng.random() < 0.5:
            self._turns.give_way(rank)
        return work

    def wait(self, work: MemoryWork, timeout: timedelta | None) -> None:
        if work.left:
            self._awaited.add(work)
            self.when_awaited(work)
            self.after_event()
            self._turns.wait_until(work.rank, lambda: work.left == 0)
            self._awaited.discard(work)
        if work.left:
            raise RuntimeError(f"aborted: {self.failure}" if self.failure else self._why_stuck(work))

    def abort(self, why: str) -> None:
        super().abort(why)
        self._turns.give_up()

    # -- what the hostile networks differ in -------------------------------------------------------

    def when_awaited(self, work: MemoryWork) -> None:
        """A rank has begun to wait for ``work``."""

    def after_event(self) -> None:
        """Something was posted, awaited or moved."""

    def when_met(self, pair: Pair) -> None:
        """Both ends are posted; the bytes may move from now on."""

    # -- inside ------------------------------------------------------------------------------------

    def _forget_but_where(self, end: End) -> None:
        if not end.is_send:
            end.tensor.data.fill_(_poison_of(end.tensor.dtype))
        self._windows[end] = Window(end.tensor)
        del end.tensor

    def meet(self, one: End, other: End) -> None:
        send, receive = (one, other) if one.is_send else (other, one)
        pair = Pair(send, receive)
        self._in_flight.append(pair)
        self.when_met(pair)

    def _move(self, pair: Pair) -> None:
        """Move the bytes of one pair, now."""
        self._in_flight.remove(pair)
        self.transfers += 1
        source, target = self._windows.pop(pair.send), self._windows.pop(pair.receive)
        into = target.look()
        if into is None:
            self._note(f"the buffer of a receive was freed before it was complete, {_words(pair.receive)}")
        else:
            came = source.look()
            if came is None:
                self._note(f"the memory of a send was freed before it was read, {_words(pair.send)}")
                came = torch.full(source.shape, _poison_of(source.dtype), dtype=source.dtype)
            try:
                self.transfer(came, into)
            except RuntimeError as error:
                self.abort(str(error))
        self.complete_end(pair.send)
        self.complete_end(pair.receive)

    def _move_something(self) -> bool:
        """Nobody can go on. Prefer what somebody waits for: the rest can be later still."""
        wanted = [p for p in self._in_flight if p.send.work in self._awaited or p.receive.work in self._awaited]
        pairs = wanted or self._in_flight
        if not pairs:
            return False
        self._move(pairs[self.rng.randrange(len(pairs))])
        return True

    def _note(self, violation: str) -> None:
        self.violations.append(violation)

    def _why_stuck(self, work: MemoryWork) -> str:
        waits = ", ".join(map(_words, work.ends))
        return f"Timed out waiting: nothing can move any more; rank {work.rank} waits on {waits}"


class LastMomentNetwork(HostileNetwork):
    """Bytes are read at the last legal moment."""

    def when_awaited(self, work: MemoryWork) -> None:
        for pair in [p for p in self._in_flight if p.send.work is work]:
            self._move(pair)

    def when_met(self, pair: Pair) -> None:
        if pair.send.work in self._awaited:
            self._move(pair)


class PoisoningNetwork(LastMomentNetwork):
    """Memory of a pending send that only the communicator still holds is what the schedule has given back: filled with
    NaN.

    Nobody but this network can read it any more, so right before the read is as good as at once.
    """

    def _move(self, pair: Pair) -> None:
        window = self._windows[pair.send]
        if window.only_communicator_holds():
            there = window.look()
            assert there is not None
            there.fill_(_poison_of(window.dtype))
            self._note(f"the schedule gave the memory of a send back before it was read, {_words(pair.send)}")
        super()._move(pair)


class ShuffledNetwork(HostileNetwork):
    """Transfers complete early, late, and in any order that the FIFO channels allow."""

    def __init__(self, size: int, one_way: bool = True, *, seed: int = 0, pollable: bool = False) -> None:
        super().__init__(size, one_way, seed=seed, pollable=pollable)
        self.haste = self.rng.choice((0.05, 0.3, 0.8))

    def after_event(self) -> None:
        while self._in_flight and self.rng.random() < self.haste:
            self._move(self.rng.choice(self._in_flight))


HOSTILE_NETWORKS: tuple[type[HostileNetwork], ...] = (LastMomentNetwork, PoisoningNetwork, ShuffledNetwork)


def _poison_of(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return _GARBAGE if torch.iinfo(dtype).max >= _GARBAGE else torch.iinfo(dtype).max


def _words(end: End) -> str:
    source, target, channel = end.direction
    return f"{'send' if end.is_send else 'receive'} from rank {source} to rank {target} on channel {channel}"
