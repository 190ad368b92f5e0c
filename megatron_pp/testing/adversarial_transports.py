"""Networks with worst-case timing, for ranks as threads: a step that passes here has no race.

A real transport reads the bytes of a send between the rendezvous and the completion of the send, mostly at a harmless
moment. These networks read at the worst moment. Like a DMA engine they keep nothing alive: a send whose memory was
freed delivers NaN (and is listed in ``violations``), and the buffer of a receive holds NaN until the transfer.

``LastMomentNetwork``  transfers when the sender waits on the send, when no rank can run, or at the end
``PoisoningNetwork``   the same; memory that only the communicator still holds counts as freed, and is filled with NaN:
                       an early release shows, although the handle owns the bytes
``ShuffledNetwork``    completes transfers at random moments, in any order that FIFO channels allow

A seed schedules the ranks (``threads.Turns``): a run repeats exactly, and a deadlock is detected immediately.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.comm.collectives import Collective
from megatron_pp.testing.memory_transport import End, MemoryNetwork, MemoryTransport, MemoryWork, Queue
from megatron_pp.testing.threads import Turns

Pair = tuple[End, End]  # a send and its receive
_GARBAGE = 0x7F7F7F7F  # content of freed memory if the dtype has no NaN


class Window:
    """The address of a tensor. Keeps nothing alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._offset = tensor.storage_offset()
        self._stride = tensor.stride()
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self.held_by_others = self._holders() > 1

    def look(self) -> torch.Tensor | None:
        """The tensor at this address, None if the memory was freed."""
        storage = self._alive()
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, self._offset, self.shape, self._stride)

    def only_communicator_holds(self) -> bool:
        """Whether only the communicator still holds memory that others held when it was posted."""
        return self.held_by_others and self._holders() <= 1

    def _holders(self) -> int:
        storage = self._alive()
        # The storage in this method is one more reference.
        return 0 if storage is None else torch._C._storage_Use_Count(storage._cdata) - 1

    def _alive(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)


class WindowNetwork(MemoryNetwork):
    """Keeps the addresses of what is sent and received, and nothing alive, as a DMA engine does. ``seed`` schedules the
    ranks, one at a time; None: they run freely."""

    def __init__(self, size: int, one_way: bool = True, store: Any = None, seed: int | None = 0) -> None:
        super().__init__(size, one_way, store)
        self.windows: dict[End, Window] = {}
        self.rng = random.Random(seed)
        self._turns = None if seed is None else Turns(size, self.rng, self.when_stuck)

    def when_stuck(self) -> bool:
        """Called when no rank can run. Returns whether it made progress."""
        return False

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        if self._turns is None:
            yield
            return
        with self._turns.running(rank):
            try:
                yield
            except BaseException as error:  # otherwise the other ranks would hang
                self.abort(f"rank {rank}: {type(error).__name__}: {error}")
                raise

    def abort(self, why: str) -> None:
        super().abort(why)
        if self._turns is not None:
            self._turns.give_up()

    def after_post(self, rank: int) -> None:
        """Called after a post: another rank may go on."""
        if self._turns is not None and self.rng.random() < 0.5:
            self._turns.give_way(rank)

    def keep_address(self, end: End) -> None:
        """Fill the buffer of a receive with NaN; drop the tensor of ``end``."""
        if not end.is_send:
            end.tensor.data.fill_(poison_of(end.tensor.dtype))
        self.windows[end] = Window(end.tensor)
        del end.tensor

    def deliver(self, send: End, receive: End) -> End | None:
        """Copy the bytes of a send into the receive's buffer. Writes NaN if the send's memory was freed, and nothing if
        the buffer was freed. Returns the end whose memory was freed, or None."""
        source = self.windows.pop(send)
        target = self.windows.pop(receive)
        into = target.look()
        sent = source.look()
        if into is None:
            return receive
        content = torch.full(source.shape, poison_of(source.dtype), dtype=source.dtype) if sent is None else sent
        try:
            self.transfer(content, into)
        except RuntimeError as error:
            self.abort(str(error))
        return send if sent is None else None


class HostileNetwork(WindowNetwork):
    """Base of the adversarial networks: a seed schedules the ranks, and transfers are late. ``pollable``:
    ``is_completed`` of a work is exact, as on NCCL. If it is not, an odd seed lets the engine put off waiting for
    sends, as for small ones on gloo."""

    def __init__(self, size: int, one_way: bool = True, *, seed: int = 0, pollable: bool = False) -> None:
        super().__init__(size, one_way, seed=seed)
        self.seed = seed
        self.pollable = pollable
        self.violations: list[str] = []
        self.transfers = 0
        self._in_flight: list[Pair] = []  # both ends are posted, bytes not yet transferred
        self._collectives_met: list[Sequence[tuple[MemoryWork, Collective]]] = []
        self._awaited: set[MemoryWork] = set()
        self._running = size

    def transport(self, rank: int) -> MemoryTransport:
        transport = super().transport(rank)
        transport.pollable = self.pollable
        transport.waits_together = self.seed % 2 == 1
        return transport

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        try:
            with super().running(rank):
                yield
        finally:
            self._running -= 1
            if self._running == 0:
                while self._in_flight or self._collectives_met:  # transfers that no rank waited for
                    self.when_stuck()

    def post(self, rank: int, queue: Queue, ends: list[End]) -> MemoryWork:
        for end in ends:
            self.keep_address(end)
        work = super().post(rank, queue, ends)
        self.after_event()
        self.after_post(rank)
        return work

    def wait(self, work: MemoryWork, timeout: timedelta | None) -> None:
        if work.left:
            self._awaited.add(work)
            self.when_awaited(work)
            self.after_event()
            assert self._turns is not None
            self._turns.wait_until(work.rank, lambda: work.left == 0)
            self._awaited.discard(work)
        if work.left:
            waits = ", ".join(map(_words, work.ends))
            stuck = f"Timed out waiting: no transfer is possible; rank {work.rank} waits on {waits}"
            raise RuntimeError(f"aborted: {self.failure}" if self.failure else stuck)

    # -- for subclasses ----------------------------------------------------------------------------

    def when_awaited(self, work: MemoryWork) -> None:
        """Called when a rank begins to wait for ``work``."""

    def after_event(self) -> None:
        """Called after an operation was posted or waited for."""

    def when_met(self, pair: Pair) -> None:
        """Called when both ends are posted. The transfer may happen from now on."""

    # -- inside ------------------------------------------------------------------------------------

    def meet(self, send: End, receive: End) -> None:
        self._in_flight.append((send, receive))
        self.when_met((send, receive))

    def _move(self, pair: Pair) -> None:
        self._in_flight.remove(pair)
        self.transfers += 1
        freed = self.deliver(*pair)
        if freed is not None:
            what = "memory of a send was freed before it was read"
            if not freed.is_send:
                what = "buffer of a receive was freed before it was complete"
            self.violations.append(f"the {what}, {_words(freed)}")
        for end in pair:
            self.complete_end(end)

    def meet_collective(self, posted: Sequence[tuple[MemoryWork, Collective]]) -> None:
        """Keep a collective until no rank can go on without it."""
        self._collectives_met.append(posted)

    def when_stuck(self) -> bool:
        """Transfer a pair that a rank waits for, or any pair if none is waited for. Without pairs, run the oldest
        collective. Returns whether there was any."""
        if self._collectives_met and not self._in_flight:
            super().meet_collective(self._collectives_met.pop(0))
            return True
        wanted = [pair for pair in self._in_flight if any(end.work in self._awaited for end in pair)]
        pairs = wanted or self._in_flight
        if not pairs:
            return False
        self._move(pairs[self.rng.randrange(len(pairs))])
        return True


class LastMomentNetwork(HostileNetwork):
    """Reads bytes at the last legal moment."""

    def when_awaited(self, work: MemoryWork) -> None:
        for send, receive in list(self._in_flight):
            if send.work is work:
                self._move((send, receive))

    def when_met(self, pair: Pair) -> None:
        if pair[0].work in self._awaited:
            self._move(pair)


class PoisoningNetwork(LastMomentNetwork):
    """Fills the memory of a pending send with NaN if only the communicator still holds it, which means that the
    schedule has released it. Only this network can still read it, so it is filled right before the read."""

    def _move(self, pair: Pair) -> None:
        window = self.windows[pair[0]]
        if window.only_communicator_holds():
            released = window.look()
            assert released is not None
            released.fill_(poison_of(window.dtype))
            self.violations.append(f"the schedule released the memory of a send before it was read, {_words(pair[0])}")
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


def poison_of(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return _GARBAGE if torch.iinfo(dtype).max >= _GARBAGE else torch.iinfo(dtype).max


def _words(end: End) -> str:
    source, target, channel = end.direction
    return f"{'send' if end.is_send else 'receive'} from rank {source} to rank {target} on channel {channel}"
