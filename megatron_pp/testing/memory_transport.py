"""Transfers between ranks that are threads of one process, with rendezvous semantics.

A transfer happens when both ends are posted and at the head of their queues; its works complete then. Queues are those
of ``plan/verify/rendezvous.py``: one per one-way channel, or one per pair of ranks when channels are shared, and one
per rank for batches; a batch leaves its queue as a whole. A step that passes here passes on NCCL with large messages,
and on gloo.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from megatron_pp.comm.collectives import Collective, InThread
from megatron_pp.comm.transport import P2PRequest, Transport, Work
from megatron_pp.testing.threads import run_ranks

Queue = tuple[object, ...]


class MemoryWork:
    def __init__(self, network: MemoryNetwork, rank: int, queue: Queue, ends: list[End]) -> None:
        self.network = network
        self.rank = rank
        self.queue = queue
        self.ends = ends
        self.left = len(ends)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.network.wait(self, timeout)
        return True

    def is_completed(self) -> bool:
        return self.left == 0


@dataclass(eq=False)
class End:
    """One end of a transfer. ``direction``: source, target and channel."""

    tensor: torch.Tensor
    direction: tuple[int, int, str]
    is_send: bool
    work: MemoryWork | None = None


class MemoryNetwork:
    """Connects ``size`` ranks. Give each thread its ``transport(rank)``.

    store  for failure records (``torch.distributed.HashStore()``); without a store there is no fault guard
    """

    def __init__(self, size: int, one_way: bool = True, store: Any = None) -> None:
        self.size = size
        self.one_way = one_way
        self.store = store
        self.changed = threading.Condition()
        self.failure: str | None = None
        self._queues: defaultdict[Queue, deque[MemoryWork]] = defaultdict(deque)
        self._open: dict[tuple[bool, tuple[int, int, str]], deque[End]] = defaultdict(deque)
        self._collectives: list[deque[tuple[MemoryWork, Collective]]] = [deque() for _ in range(size)]

    def transport(self, rank: int) -> MemoryTransport:
        return MemoryTransport(self, rank)

    def running(self, rank: int) -> AbstractContextManager[None]:
        """A context for the thread of ``rank``, for networks that schedule the ranks."""
        return nullcontext()

    def post(self, rank: int, queue: Queue, ends: list[End]) -> MemoryWork:
        with self.changed:
            return self.enqueue(MemoryWork(self, rank, queue, ends))

    def enqueue(self, work: MemoryWork) -> MemoryWork:
        """Put ``work`` into its queue. Returns it."""
        for end in work.ends:
            end.work = work
        waiting = self._queues[work.queue]
        waiting.append(work)
        if len(waiting) == 1:
            self._activate(work)
        return work

    def wait(self, work: MemoryWork, timeout: timedelta | None) -> None:
        seconds = None if timeout is None else timeout.total_seconds()
        with self.changed:
            done = self.changed.wait_for(lambda: work.left == 0 or self.failure is not None, seconds)
        if work.left and self.failure is not None:
            raise RuntimeError(f"aborted: {self.failure}")
        if not done:
            raise RuntimeError(f"Timed out waiting {seconds} s")

    def abort(self, why: str) -> None:
        """Fail every wait, now and later."""
        with self.changed:
            self.failure = why
            self.changed.notify_all()

    def post_collective(self, rank: int, collective: Collective) -> MemoryWork:
        """Post a collective, which runs when all ranks have posted it."""
        with self.changed:
            work = MemoryWork(self, rank, (rank, "collectives"), [])
            work.left = 1
            self._collectives[rank].append((work, collective))
            if all(self._collectives):
                self.meet_collective([posted.popleft() for posted in self._collectives])
        return work

    def meet_collective(self, posted: Sequence[tuple[MemoryWork, Collective]]) -> None:
        """Called when all ranks have posted a collective."""
        try:
            run_together([collective for _, collective in posted])
        except RuntimeError as error:
            self.abort(str(error))
            return
        with self.changed:
            for work, _ in posted:
                work.left = 0
            self.changed.notify_all()

    def transfer(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.dtype != target.dtype or source.numel() != target.numel():
            raise RuntimeError(
                f"sent {source.dtype} {tuple(source.shape)}, receiving {target.dtype} {tuple(target.shape)}"
            )
        target.data.copy_(source.view(target.shape))

    def _activate(self, work: MemoryWork) -> None:
        for end in work.ends:
            partners = self._open[(not end.is_send, end.direction)]
            if partners:
                partner = partners.popleft()
                send, receive = (end, partner) if end.is_send else (partner, end)
                self.meet(send, receive)
            else:
                self._open[(end.is_send, end.direction)].append(end)

    def meet(self, send: End, receive: End) -> None:
        """Called when both ends of a transfer are posted and at the head of their queues."""
        try:
            self.transfer(send.tensor, receive.tensor)
        except RuntimeError as error:
            self.abort(str(error))
        self.complete_end(send)
        self.complete_end(receive)

    def complete_end(self, end: End) -> None:
        """Called when the transfer of one end is done."""
        with self.changed:
            work = end.work
            assert work is not None
            work.left -= 1
            if work.left == 0:
                self._complete(work)

    def _complete(self, work: MemoryWork) -> None:
        queue = self._queues[work.queue]
        queue.popleft()
        work.ends = []
        self.changed.notify_all()
        if queue:
            self._activate(queue[0])


class MemoryCollectives:
    """The collectives of one rank. All ranks run them together, each in a thread."""

    def __init__(self, rank: int, gathered: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.gathered = gathered
        self.barrier = barrier

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        source = self.all_gather(tensor)[root]
        if self.rank != root:
            tensor.copy_(source)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.gathered[self.rank] = tensor.clone()
        self.barrier.wait()
        stacked = torch.stack(self.gathered)
        self.barrier.wait()
        return stacked

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        stacked = self.all_gather(tensor)
        tensor.copy_(stacked.sum(0) if self.rank == root else torch.full_like(tensor, torch.nan))


def run_together(collectives: Sequence[Collective]) -> None:
    """Run ``collectives``, one of each rank, as one. Raises RuntimeError if one of them fails."""
    size = len(collectives)
    gathered = [torch.empty(0)] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> None:
        InThread(collectives[rank], MemoryCollectives(rank, gathered, barrier)).wait()

    try:
        run_ranks(size, run, on_failure=lambda why: barrier.abort())
    except Exception as error:
        raise RuntimeError(f"a collective failed: {error!r}") from error


class MemoryTransport(Transport):
    """One rank's side of a MemoryNetwork. ``aborted`` stays False: the network holds the failure."""

    name = "threads"
    # Whether sends are left unfinished although their completion cannot be polled, as for small ones on gloo.
    waits_together = False

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.size = network.size
        self.device = torch.device("cpu")

    def unfinished_sends(self, allowed: int, message_bytes: float) -> int:
        return allowed if self.pollable or self.waits_together else 0

    def collective(self, collective: Collective) -> Work:
        return self.network.post_collective(self.rank, collective)

    @property
    def store(self) -> Any:
        return self.network.store

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> MemoryWork:
        return self._post(tensor, peer, channel, True)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> MemoryWork:
        return self._post(tensor, peer, channel, False)

    def batch(self, requests: Sequence[P2PRequest]) -> list[MemoryWork]:
        ends = [self._end(r.tensor, r.peer, "batch", r.is_send) for r in requests]
        return [self.network.post(self.rank, (self.rank, "batch"), ends)]

    def abort(self) -> None:
        self.network.abort(f"rank {self.rank} aborted")

    def _post(self, tensor: torch.Tensor, peer: int, channel: str, is_send: bool) -> MemoryWork:
        if self.network.one_way:
            end = self._end(tensor, peer, channel, is_send)
            return self.network.post(self.rank, (self.rank, *end.direction), [end])
        queue = (self.rank, *sorted((self.rank, peer)))
        return self.network.post(self.rank, queue, [self._end(tensor, peer, "shared", is_send)])

    def _end(self, tensor: torch.Tensor, peer: int, channel: str, is_send: bool) -> End:
        source, target = (self.rank, peer) if is_send else (peer, self.rank)
        return End(tensor, (source, target, channel), is_send)
