"""Transfers between pipeline ranks: the interface below the communicator, and its implementation on process groups.

``megatron_pp.testing`` has another implementation, for ranks that are threads. Peers are ranks within the pipeline
group. A channel is ``ACT`` or ``GRAD``; together with source and destination it names a FIFO.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from megatron_pp.comm.abort import abort_groups
from megatron_pp.comm.at_exit import call_at_exit
from megatron_pp.comm.channels import Channel, ChannelGroups, Key, pipeline_name
from megatron_pp.comm.gloo import LARGE_BYTES, ChannelThreads
from megatron_pp.errors import P2PError, P2PTransferError
from megatron_pp.plan.costs import GLOO_DETACHED_BYTES

ACT = "A"
GRAD = "G"
Edge = tuple[int, int]

# gloo keeps messages of different tags apart; the numbers only have to differ from what users send on the same group.
_TAGS = {ACT: 0x4D5001, GRAD: 0x4D5002}
_SHARED_TAG = 0x4D5000
_TAGS_OF_ONE_AGREEMENT = 0x100  # tags are 31 bits wide
_AGREEMENTS = 0x10000


class Work(Protocol):
    """What a posted operation returns; torch's Work has this shape."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class P2PRequest(NamedTuple):
    """One member of a batch."""

    is_send: bool
    tensor: torch.Tensor
    peer: int
    channel: str


class Transport(Protocol):
    """Point-to-point transfers between the ranks of one pipeline group. Subclasses inherit the methods that do nothing.

    rank, size   this rank and the number of ranks in the group
    device       where tensors must lie
    pollable     whether ``Work.is_completed`` is right before ``wait`` (NCCL does; gloo of large messages)
    blocks_host  whether ``Work.wait`` returns when the transfer is done; else (NCCL) the current stream waits for it
    aborted      whether ``abort`` was called
    backend      which backend of torch.distributed carries the messages; empty where none does
    name         of this pipeline, different from others' on the same store
    guard        the fault guard of this pipeline, set by ``megatron_pp.faults``; None until the first step
    """

    rank: int
    size: int
    device: torch.device
    pollable: bool = False
    blocks_host: bool = True
    aborted: bool = False
    backend: str = ""
    name: str = ""
    guard: Any = None

    @property
    def store(self) -> Any:
        """The torch Store through which ranks learn of each other's failures; None where they share none."""
        return None

    @property
    def limit(self) -> timedelta | None:
        """The process group's own timeout; None where there is none."""
        return None

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work: ...

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Work: ...

    def batch(self, requests: Sequence[P2PRequest]) -> Sequence[Work]:
        """Post all requests as one grouped call; one work per request, or one for all."""
        ...

    def prepare(self, edges: Iterable[Edge], received_bytes: float, sent_bytes: float, timeout: timedelta) -> None:
        """Make the channels for activations along ``edges`` (source, target) and for gradients back. Collective.
        ``received_bytes``, ``sent_bytes``: sizes of the activations that this rank receives and sends, 0 if unknown.
        ``timeout``: for each channel.
        """
        return

    def use_agreement(self, number: int) -> None:
        """A step begins that runs plan ``number`` of those that the ranks have agreed on."""
        return

    def global_rank(self, rank: int) -> int:
        """The number in the whole job of a rank of the pipeline."""
        return rank

    def abort(self) -> None:
        """Make every blocked or later operation of this rank fail; called from another thread when a peer failed."""
        return

    def close(self) -> None:
        """End the transport's threads, before the process group is destroyed."""
        return

    def is_gone(self) -> bool:
        """Whether the process group was destroyed."""
        return False


class ProcessGroupTransport(Transport):
    """Transfers over a ``torch.distributed`` process group.

    On NCCL, and on gloo where messages are large, each one-way channel has a process group of its own
    (``channels.py``), made and warmed up when the plan's edges are known, never in the middle of a step
    (pytorch#129140, Megatron-LM#5240). Other channels share the given group, on gloo distinguished by tag.
    """

    def __init__(self, group: dist.ProcessGroup, one_way: bool = True, warm_up: bool = True) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.one_way = one_way
        self.warm_up = warm_up
        self.backend = backend_of(group)
        self.pollable = self.backend == "nccl"
        self.blocks_host = self.backend != "nccl"
        self.device = device_of(self.backend)
        # Here, as construction is the one place that all members reach together; on NCCL it may be collective.
        self.name = pipeline_name(group, self.backend, self.device)
        self._tags = self._base_tags = _TAGS if one_way else dict.fromkeys(_TAGS, _SHARED_TAG)
        self._agreement = 0
        self._groups: ChannelGroups | None = None
        self._channels: dict[Key, Channel] = {}
        self._threads: ChannelThreads | None = None
        self._large = False  # whether any message was: small ones may get stuck behind it
        if self.backend != "nccl":
            self._threads = ChannelThreads()
            weakref.finalize(self, self._threads.close)
            call_at_exit(self.end)

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        own = self._channels.get((self.rank, peer, channel)) if self._channels else None
        group, end = (self.group, peer) if own is None else own
        tag = self._tags[channel]
        large = self._threads is not None and tensor.nbytes >= LARGE_BYTES
        self._large = self._large or large
        if self._threads is not None and own is not None:
            return self._threads.post(("sends", channel, "to", peer), partial(group.send, [tensor], end, tag))
        try:
            work = group.send([tensor], end, tag)
        except RuntimeError as error:
            self._post_failed(error, f"send on channel {channel} to rank {peer}")
        if self._threads is None:
            return work
        return self._threads.follow(("sends", channel, "to", peer), work, ahead=large)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        own = self._channels.get((peer, self.rank, channel)) if self._channels else None
        group, end = (self.group, peer) if own is None else own
        try:
            work = group.recv([tensor], end, self._tags[channel])
        except RuntimeError as error:
            self._post_failed(error, f"receive on channel {channel} from rank {peer}")
        if self._threads is None or (own is None and not self._large and tensor.nbytes < LARGE_BYTES):
            return work
        self._large = True
        return self._threads.follow(("receives", channel, "from", peer), work)

    def batch(self, requests: Sequence[P2PRequest]) -> Sequence[Work]:
        if self.backend != "nccl":  # gloo has no grouped call: the same operations, each at once
            return [(self.isend if r.is_send else self.irecv)(r.tensor, r.peer, r.channel) for r in requests]
        ops = [
            dist.P2POp(dist.isend if r.is_send else dist.irecv, r.tensor, self.global_rank(r.peer), self.group)
            for r in requests
        ]
        try:
            return dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            self._post_failed(error, f"batch of {len(ops)} sends and receives")

    def _post_failed(self, error: RuntimeError, what: str) -> NoReturn:
        """Raise ``error`` as the failure of a transfer; subclasses such as out of memory are raised as they are."""
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise error
        raise P2PTransferError(f"pipeline rank {self.rank}, {what}: it cannot be posted: {error}") from error

    def prepare(self, edges: Iterable[Edge], received_bytes: float, sent_bytes: float, timeout: timedelta) -> None:
        if not self.one_way:
            return
        if self.backend != "nccl":  # both ends of an edge know the same size: one of what it sends, the other receives
            bytes_of = {True: sent_bytes, False: received_bytes}
            mine = [edge for edge in edges if self.rank in edge]
            large = [edge for edge in mine if bytes_of[self.rank == edge[0]] >= GLOO_DETACHED_BYTES]
            edges = large if "gloo" in dist.get_backend(self.group) else []
        keys = [key for s, t in sorted(edges) for key in ((s, t, ACT), (t, s, GRAD))]
        if all(key in self._channels for key in keys if self.rank in key[:2]):
            return
        if self._groups is None:
            limit: timedelta = self.group._get_backend(self.device).options._timeout
            self._groups = ChannelGroups(self.backend, self.store, self.name, self.rank, limit)
            if self._threads is not None:
                self._threads.limit = (limit,)
            self._channels = self._groups.channels
            # torch does not know these groups: they are closed with the transport, or when the program ends.
            self._close_groups = weakref.finalize(self, self._groups.close)
        made = self._groups.make(keys, timeout)
        if self.warm_up and self.backend == "nccl":
            self._warm_up(made)

    def _warm_up(self, keys: Iterable[Key]) -> None:
        """One small message through each new channel: the communicators exist before the first step needs them."""
        token = torch.zeros(1, device=self.device)
        for source, target, channel in keys:
            work = self.isend(token, target, channel) if source == self.rank else self.irecv(token, source, channel)
            work.wait()
        torch.cuda.synchronize(self.device)

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def abort(self) -> None:
        self.aborted = True
        if self._groups is not None:
            self._groups.aborted = True
        abort_groups((self.group, *(channel.group for channel in self._channels.values())))
        if self._threads is not None:
            self._threads.interrupt("a rank of the pipeline has failed")

    def use_agreement(self, number: int) -> None:
        """On gloo, tags keep the messages of different plans apart, whose shapes may differ: ranks that are at
        different plans wait for each other, and the fault guard reports it. (NCCL has no tags; there the guard finds
        out a moment later.)"""
        if number != self._agreement:
            self._agreement = number
            shift = number % _AGREEMENTS * _TAGS_OF_ONE_AGREEMENT
            self._tags = {kind: tag + shift for kind, tag in self._base_tags.items()}

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
        if self._groups is not None:
            self._close_groups()
            self._groups = None

    def end(self) -> None:
        """The program ends. A transfer that is still on its way is aborted, which wakes its thread."""
        if self._threads is not None and self._threads.end():
            self.abort()
            self._threads.end()

    def is_gone(self) -> bool:
        return self.group not in dist.distributed_c10d._world.pg_map

    @property
    def limit(self) -> timedelta:
        return self.group._get_backend(self.device).options._timeout

    @property
    def store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()


def backend_of(group: dist.ProcessGroup) -> str:
    """``nccl`` or ``gloo``: which of the group's backends carries the tensors. A mixed group uses NCCL where there is
    a GPU.
    """
    return "nccl" if "nccl" in dist.get_backend(group) and torch.cuda.is_available() else "gloo"


def device_of(backend: str) -> torch.device:
    """Where tensors that ``backend`` carries lie."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


class SoloTransport(Transport):
    """A pipeline of one rank: no transfers, no process group."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        raise P2PError(f"a pipeline of one rank cannot exchange tensors with rank {peer}")

    irecv = isend

    def batch(self, requests: Sequence[P2PRequest]) -> Sequence[Work]:
        return [self.isend(*request[1:]) for request in requests]

    def global_rank(self, rank: int) -> int:
        return dist.get_rank() if dist.is_initialized() else 0
