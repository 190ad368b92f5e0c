"""The interface below the communicator: transfers between the ranks of one pipeline.

``group_transport.py`` has the implementation on process groups, ``megatron_pp.testing`` one for ranks that are threads.
Peers are ranks within the pipeline group. A channel is ``ACT`` or ``GRAD``; source, target and channel name a FIFO.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from megatron_pp.errors import P2PError

if TYPE_CHECKING:
    from megatron_pp.comm.collectives import Collective

ACT = "A"
GRAD = "G"
Edge = tuple[int, int]


class Work(Protocol):
    """The handle of a posted operation; torch's Work has these methods."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class P2PRequest(NamedTuple):
    """One member of a batch."""

    is_send: bool
    tensor: torch.Tensor
    peer: int
    channel: str


class Preparation(NamedTuple):
    """What plans need from a transport.

    edges           (source, target) of activations; gradients go back along them
    batched         whether all messages go out as batches
    with_shapes     whether shapes are sent ahead of tensors
    received_bytes, sent_bytes  sizes of the activations that this rank receives and sends, 0 if unknown
    collectives     whether there are collectives of all ranks"""

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
    shape_device where shapes that are sent ahead of tensors must lie; None: with the tensors
    pollable     whether ``Work.is_completed`` is exact before ``wait`` (on NCCL; on gloo for large messages)
    blocks_host  whether ``Work.wait`` returns when the transfer is done; if not (NCCL) the current stream waits for it
    groups_calls whether ``batch`` is more than its requests one by one
    aborted      whether ``abort`` was called
    backend      which backend of torch.distributed carries the messages; empty where none does
    name         of this pipeline, unique on the store
    guard        the fault guard of this pipeline, set by ``megatron_pp.faults``; None until the first step
    in_step      whether a step of this rank is running, whose messages another one would receive"""

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
    in_step: bool = False

    @property
    def store(self) -> Any:
        """The torch Store through which ranks learn of each other's failures; None if they share none."""
        return None

    @property
    def limit(self) -> timedelta | None:
        """The process group's own timeout; None if it has none."""
        return None

    def unfinished_sends(self, allowed: int, message_bytes: float) -> int:
        """How many sends a rank leaves unfinished before it waits. If their end can be polled it is ``allowed``, which
        is ``config.max_pending_sends``. ``message_bytes``: size of the largest message; 0 if it is not known."""
        return allowed if self.pollable else 0

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        """Post the send of a contiguous tensor, which the caller keeps until it is done; never blocks the host."""

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        """Post a receive into ``tensor``, contiguous and of the sender's shape and dtype; never blocks the host."""

    def batch(self, requests: Sequence[P2PRequest]) -> Sequence[Work]:
        """Post all requests as one grouped call (by default singly). Returns one work per request, or one for all."""
        return [(self.isend if request.is_send else self.irecv)(*request[1:]) for request in requests]

    def collective(self, collective: Collective) -> Work:
        """Post a collective of all ranks. Collectives run on all ranks in the order in which they are posted."""
        raise P2PError(f"{type(self).__name__} has no collectives")

    def prepare(self, needs: Preparation, timeout: timedelta) -> None:
        """Make the channels that ``needs`` asks for and that are missing. Collective. ``timeout``: for each channel."""
        return

    def use_agreement(self, number: int) -> None:
        """Called when a step begins that runs plan ``number`` of those that the ranks have agreed on."""
        return

    def global_rank(self, rank: int) -> int:
        """The number in the whole job of a rank of the pipeline."""
        return rank

    def abort(self) -> None:
        """Make every blocked or later operation of this rank fail. Another thread calls it when a peer has failed."""
        return

    def forget(self) -> None:
        """Drop tensors kept for aborted transfers. The thread that posts transfers calls it."""
        return

    def close(self) -> None:
        """End the transport's threads, before the process group is destroyed."""
        return

    def is_gone(self) -> bool:
        """Whether the process group was destroyed."""
        return False
