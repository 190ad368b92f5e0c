"""Collectives of all ranks of a pipeline, for an output layer that is split over them.

They run on a communicator of their own, one after the other in posting order. One may be several operations of
torch.distributed with arithmetic between them, such as the all-reduce of softmax statistics: the rank goes on
meanwhile. On gloo a thread runs them, on NCCL a stream of their own.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_pp.comm.events import EventPool


class Collectives(Protocol):
    """The operations of which a collective consists, the same on all ranks. When a call returns, the next one may use
    its tensors."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy ``tensor`` of rank ``root`` into ``tensor`` of every other rank."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked in the order of ranks."""

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Sum ``tensor`` over all ranks into that of rank ``root``. On other ranks it is undefined afterwards."""


Collective = Callable[[Collectives], None]


class GroupCollectives:
    """On a process group of the pipeline's ranks. ``limit``: the timeout of each operation."""

    def __init__(self, group: dist.ProcessGroup, limit: Callable[[], timedelta]) -> None:
        self.group = group
        self.limit = limit
        self.events = EventPool()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = root, self.limit()
        self.group.broadcast([tensor], options).wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = [torch.empty_like(tensor) for _ in range(self.group.size())]
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = self.limit()
        self.group.allgather([gathered], [tensor], options).wait()
        return torch.stack(gathered)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.ReduceOptions()
        options.rootRank, options.timeout = root, self.limit()
        self.group.reduce([tensor], options).wait()


class LoneCollectives:
    """For a pipeline of one rank."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Does nothing: there is no other rank."""

    reduce = broadcast

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None]


class InThread:
    """The work of a collective that the thread which waits for it runs (``gloo.ChannelThreads.post``)."""

    def __init__(self, collective: Collective, collectives: Collectives) -> None:
        self._run = (collective, collectives)

    def wait(self, *limit: timedelta) -> bool:
        collective, collectives = self._run
        with torch.no_grad():
            collective(collectives)
        return True


class Done:
    """The work of a collective that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class OnStream:
    """The work of a collective on a stream: the current stream waits for it, not the host."""

    def __init__(self, collective: Collective, collectives: GroupCollectives, stream: Any) -> None:
        self._events = collectives.events
        self._events.order(torch.cuda.current_stream(), stream)
        with torch.cuda.stream(stream), torch.no_grad():
            collective(collectives)
        self._event: Any = self._events.record(stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Called once: a handle waits for its work once."""
        torch.cuda.current_stream().wait_event(self._event)
        self._events.give_back(self._event)
        self._event = None
        return True

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())
