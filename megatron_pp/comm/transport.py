"""Transfers between pipeline ranks: the interface below the communicator, and its implementation on process groups.

``megatron_pp.testing`` has another implementation, for ranks that are threads. Peers are ranks within the pipeline
group. A channel is ``ACT`` or ``GRAD``; together with source and destination it names a FIFO.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from megatron_pp.comm.abort import abort_groups
from megatron_pp.comm.at_exit import call_at_exit
from megatron_pp.comm.channels import SHAPES, Channel, ChannelGroups, Key, ShapeTransfer, in_rounds, pipeline_name
from megatron_pp.comm.gloo import LARGE_BYTES, SMALL_SENDS, ChannelThreads
from megatron_pp.errors import P2PError, P2PTransferError
from megatron_pp.on_demand import load
from megatron_pp.plan.costs.transports import GLOO_DETACHED_BYTES

if TYPE_CHECKING:
    from megatron_pp.comm.collectives import Collective, GroupCollectives

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


class Preparation(NamedTuple):
    """What plans need of a transport.

    edges           (source, target) of activations; gradients go back along them
    batched         whether all messages go out as batches
    with_shapes     whether shapes travel ahead of tensors
    received_bytes, sent_bytes  sizes of the activations that this rank receives and sends, 0 if unknown
    collectives     whether there are collectives of all ranks
    """

    edges: tuple[Edge, ...]
    batched: bool = False
    with_shapes: bool = False
    received_bytes: float = 0
    sent_bytes: float = 0
    collectives: bool = False


class Transport(Protocol):
    """Point-to-point transfers between the ranks of one pipeline group. Subclasses inherit the methods that do nothing.

    rank, size   this rank and the number of ranks in the group
    device       where tensors must lie
    shape_device where the shapes that travel ahead of tensors must lie; None: with the tensors
    pollable     whether ``Work.is_completed`` is right before ``wait`` (NCCL does; gloo of large messages)
    blocks_host  whether ``Work.wait`` returns when the transfer is done; else (NCCL) the current stream waits for it
    groups_calls whether ``batch`` is more than its requests one by one
    aborted      whether ``abort`` was called
    backend      which backend of torch.distributed carries the messages; empty where none does
    name         of this pipeline, different from others' on the same store
    guard        the fault guard of this pipeline, set by ``megatron_pp.faults``; None until the first step
    """

    rank: int
    size: int
    device: torch.device
    shape_device: torch.device | None = None
    pollable: bool = False
    blocks_host: bool = True
    groups_calls: bool = True
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

    def unfinished_sends(self, allowed: int, message_bytes: float) -> int:
        """How many sends a rank leaves unfinished before it waits: where their end can be polled, those ``allowed`` by
        ``config.max_pending_sends``. ``message_bytes``: of the largest; 0 where it is not known.
        """
        return allowed if self.pollable else 0

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        """Post the send of a contiguous tensor, which the caller keeps until it is done; never blocks the host."""

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        """Post a receive into ``tensor``, contiguous and of the sender's shape and dtype; never blocks the host."""

    def batch(self, requests: Sequence[P2PRequest]) -> Sequence[Work]:
        """Post all requests as one grouped call; one work per request, or one for all."""
        ...

    def collective(self, collective: Collective) -> Work:
        """Post a collective of all ranks; they run on all ranks in the order in which they are posted."""
        raise P2PError(f"{type(self).__name__} has no collectives")

    def prepare(self, needs: Preparation, timeout: timedelta) -> None:
        """Make what ``needs`` says, where it is missing. Collective. ``timeout``: for each channel."""
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
    (pytorch#129140, Megatron-LM#5240). Other channels share the given group, on gloo distinguished by tag. Batches on
    NCCL go over the given group; plans that have nothing else make no channels for tensors.

    On NCCL, shapes that travel ahead of tensors go from host to host over gloo: the host needs them, and would
    otherwise wait for the device. ``max_ctas``: ``config.p2p_max_ctas``.
    """

    def __init__(
        self, group: dist.ProcessGroup, one_way: bool = True, warm_up: bool = True, max_ctas: int | None = None
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.one_way = one_way
        self.warm_up = warm_up
        self.max_ctas = max_ctas
        self.backend = backend_of(group)
        self.pollable = self.backend == "nccl"
        self.blocks_host = self.backend != "nccl"
        self.groups_calls = self.backend == "nccl"
        self.device = device_of(self.backend)
        self.shape_device = torch.device("cpu")
        self._prepared: set[Preparation] = set()
        # Here, as construction is the one place that all members reach together; on NCCL it may be collective.
        self.name = pipeline_name(group, self.backend, self.device)
        # On NCCL only shapes have tags, on channels of their own.
        self._tags = self._base_tags = _TAGS if one_way or self.pollable else dict.fromkeys(_TAGS, _SHARED_TAG)
        self._agreement = 0
        self._groups: ChannelGroups | None = None
        self._channels: dict[Key, Channel] = {}
        self._collectives: GroupCollectives | None = None
        self._collective_stream: Any = None
        self._threads: ChannelThreads | None = None
        self._large = False  # whether any message was: small ones may get stuck behind it
        if self.backend != "nccl":
            self._threads = ChannelThreads()
            weakref.finalize(self, self._threads.close)
            call_at_exit(self.end)

    def unfinished_sends(self, allowed: int, message_bytes: float) -> int:
        """On gloo a wait for a send wakes a thread, so small ones are waited for together."""
        if self.pollable:
            return allowed
        return SMALL_SENDS if 0 < message_bytes < LARGE_BYTES else 0

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        if self._threads is None and not tensor.is_cuda:
            return self._shape_transfer("send", tensor, peer, channel)
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
        if self._threads is None and not tensor.is_cuda:
            return self._shape_transfer("recv", tensor, peer, channel)
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
        if self.backend != "nccl" or not requests[0].tensor.is_cuda:  # gloo has no grouped call: each at once
            return [self._post(request) for request in requests]
        ops = [
            dist.P2POp(dist.isend if r.is_send else dist.irecv, r.tensor, self.global_rank(r.peer), self.group)
            for r in requests
        ]
        try:
            return dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            self._post_failed(error, f"batch of {len(ops)} sends and receives")

    def _post(self, request: P2PRequest) -> Work:
        return (self.isend if request.is_send else self.irecv)(*request[1:])

    def _shape_transfer(self, method: str, tensor: torch.Tensor, peer: int, channel: str) -> ShapeTransfer:
        own = self._channels.get((min(self.rank, peer), max(self.rank, peer), SHAPES))
        if own is None or self._groups is None:
            raise P2PError(f"pipeline rank {self.rank}: no channel for shapes was made with rank {peer}")
        try:
            work = getattr(own.group, method)([tensor], own.peer, self._tags[channel])
        except RuntimeError as error:
            self._post_failed(error, f"shape on channel {channel}, with rank {peer}")
        return ShapeTransfer(work, self._groups)

    def _post_failed(self, error: RuntimeError, what: str) -> NoReturn:
        """Raise ``error`` as the failure of a transfer; subclasses such as out of memory are raised as they are."""
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise error
        raise P2PTransferError(f"pipeline rank {self.rank}, {what}: it cannot be posted: {error}") from error

    def prepare(self, needs: Preparation, timeout: timedelta) -> None:
        self._follow_timeout()
        if self.backend == "nccl":
            needs = needs._replace(received_bytes=0, sent_bytes=0)
        else:  # only which of the messages are large makes a difference
            received, sent = map(self._size_if_large, (needs.received_bytes, needs.sent_bytes))
            needs = Preparation(needs.edges, False, False, received, sent, needs.collectives)
        if needs in self._prepared:
            return
        made = self._make_channels(self._channels_for(needs), timeout)
        if needs.collectives and self._collectives is None:
            self._make_collectives(timeout)
        # The first batch makes the group's communicator, which takes all ranks; they cannot wait for shapes then.
        if self.backend == "nccl" and (self.warm_up or (needs.batched and needs.with_shapes)):
            self._warm_up(needs, made)
        self._prepared.add(needs)

    def _size_if_large(self, size: float) -> float:
        """The size of messages that need a channel of their own on gloo, 0 for others."""
        has_channels = self.one_way and "gloo" in dist.get_backend(self.group)
        return size if has_channels and size >= GLOO_DETACHED_BYTES else 0

    def _channels_for(self, needs: Preparation) -> list[Key]:
        """The channels that ``needs`` wants of this rank."""
        keys = self._ways(needs.edges, needs.with_shapes)
        if self.backend == "nccl":
            with_tensors = self.one_way and not needs.batched
            return [key for key in keys if with_tensors or key[2] == SHAPES]

        def is_large(key: Key) -> bool:
            # Both ends of an edge know the same size: one of what it sends, the other of what it receives.
            source = key[0] if key[2] == ACT else key[1]
            return (needs.sent_bytes if source == self.rank else needs.received_bytes) > 0

        return [key for key in keys if is_large(key)]

    def _ways(self, edges: Iterable[Edge], with_shapes: bool = False) -> list[Key]:
        """What this rank is an end of, in an order that is the same on all ranks."""
        keys = [key for s, t in sorted(edges) for key in ((s, t, ACT), (t, s, GRAD))]
        if with_shapes:
            keys += sorted({(min(edge), max(edge), SHAPES) for edge in edges})
        return [key for together in in_rounds(keys) for key in together if self.rank in key[:2]]

    def _make_channels(self, keys: list[Key], timeout: timedelta) -> list[Key]:
        """Those of ``keys`` that were missing."""
        return self._made_groups().make(keys, timeout) if keys else []

    def _made_groups(self) -> ChannelGroups:
        if self._groups is None:
            members = dist.get_process_group_ranks(self.group)
            self._groups = ChannelGroups(
                self.backend, self.store, self.name, self.rank, members, self._options, self.max_ctas
            )
            if self._threads is not None:
                self._threads.limit = (self._groups.timeout,)
            self._channels = self._groups.channels
            # torch does not end these groups: they are closed with the transport, or when the program ends.
            self._close_groups = weakref.finalize(self, self._groups.close)
        return self._groups

    def _make_collectives(self, timeout: timedelta) -> None:
        """The communicator of collectives of all ranks, warmed up. Collective."""
        groups = self._made_groups()
        group = groups.make_group(timeout)
        self._collectives = made = load("collectives").GroupCollectives(group, lambda: groups.timeout)
        if self.backend == "nccl":
            self._collective_stream = torch.cuda.Stream(self.device, priority=-1)
        token = torch.zeros(1, device=self.device)
        made.broadcast(token, 0)

    def collective(self, collective: Collective) -> Work:
        assert self._collectives is not None, "prepare() makes the communicator"
        if self._threads is None:
            return load("collectives").OnStream(collective, self._collectives, self._collective_stream)
        return self._threads.post("collectives", partial(load("collectives").InThread, collective, self._collectives))

    @property
    def _options(self) -> Any:
        """Of the pipeline group's backend."""
        return self.group._get_backend(self.device).options

    def _follow_timeout(self) -> None:
        """The pipeline group's timeout may have been changed."""
        if self._groups is None:
            return
        limit: timedelta = self._options._timeout
        if limit != self._groups.timeout:
            self._groups.follow_timeout(limit)
            if self._threads is not None:
                self._threads.limit = (limit,)

    def _warm_up(self, needs: Preparation, made: list[Key]) -> None:
        """Small messages: the communicators that ``needs`` uses exist before the first step. ``made``: new channels."""
        on_channels = self.one_way and not needs.batched
        keys = [key for key in made if key[2] != SHAPES] if on_channels else self._ways(needs.edges)
        tokens = [self._token(*key) for key in keys]
        if not tokens:  # a pipeline of one rank, or no new channel
            return
        if needs.batched:
            for work in self.batch(tokens):
                work.wait()
        else:  # one after the other
            for token in tokens:
                self._post(token).wait()
        torch.cuda.synchronize(self.device)

    def _token(self, source: int, target: int, channel: str) -> P2PRequest:
        is_send = source == self.rank
        return P2PRequest(is_send, torch.zeros(1, device=self.device), target if is_send else source, channel)

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def abort(self) -> None:
        self.aborted = True
        if self._groups is not None:
            self._groups.aborted = True
        collective = () if self._collectives is None else (self._collectives.group,)
        abort_groups((self.group, *(channel.group for channel in self._channels.values()), *collective))
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
        return self._options._timeout

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
