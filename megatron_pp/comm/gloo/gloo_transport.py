"""Transfers over gloo, which the threads of ``waiting_threads.py`` wait for."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_pp.comm.gloo.waiting_threads import LARGE_BYTES, SMALL_SENDS, ChannelThreads
from megatron_pp.comm.group_transport import GroupTransport
from megatron_pp.comm.transport import ACT, Preparation, Work
from megatron_pp.common.finalizers import call_at_exit, finalize_here
from megatron_pp.plan.costs.transports import GLOO_DETACHED_BYTES

if TYPE_CHECKING:
    from megatron_pp.comm.channels import ChannelKey
    from megatron_pp.comm.collectives import Collective

_SHARED_TAG = 0x4D5000


class GlooTransport(GroupTransport):
    """Each channel of large messages has a group of its own. Others share the pipeline's group, with a tag each."""

    backend = "gloo"
    groups_calls = False

    def __init__(self, group: dist.ProcessGroup, one_way: bool) -> None:
        super().__init__(group, one_way)
        if not one_way:
            self._tags = self._base_tags = dict.fromkeys(self._base_tags, _SHARED_TAG)
        self._large = False  # whether any message was large: small ones may then get stuck behind it
        self._threads = ChannelThreads()
        finalize_here(self, self._threads.close)
        call_at_exit(self.end)

    def unfinished_sends(self, allowed: int, message_bytes: float) -> int:
        """Small sends are left unfinished and waited for together, because each wait wakes a thread."""
        return SMALL_SENDS if 0 < message_bytes < LARGE_BYTES else 0

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        own = self._channels.get((self.rank, peer, channel)) if self._channels else None
        tag = self._tags[channel]
        large = tensor.nbytes >= LARGE_BYTES
        self._large = self._large or large
        if own is not None:
            return self._threads.post(("sends", channel, "to", peer), partial(own.group.send, [tensor], own.peer, tag))
        try:
            work = self.group.send([tensor], peer, tag)
        except RuntimeError as error:
            self._post_failed(error, f"send on channel {channel} to rank {peer}")
        return self._threads.follow(("sends", channel, "to", peer), work, ahead=large)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        own = self._channels.get((peer, self.rank, channel)) if self._channels else None
        group, end = (self.group, peer) if own is None else own
        try:
            work = group.recv([tensor], end, self._tags[channel])
        except RuntimeError as error:
            self._post_failed(error, f"receive on channel {channel} from rank {peer}")
        if own is None and not self._large and tensor.nbytes < LARGE_BYTES:
            return work
        self._large = True
        return self._threads.follow(("receives", channel, "from", peer), work)

    def collective(self, collective: Collective) -> Work:
        assert self._collectives is not None, "prepare() makes the communicator"
        from megatron_pp.comm.collectives import InThread

        return self._threads.post("collectives", partial(InThread, collective, self._collectives))

    def prepare(self, needs: Preparation, timeout: timedelta) -> None:
        super().prepare(needs, timeout)
        if self._groups is not None:
            self._threads.limit = (self._groups.timeout,)

    def _what_counts(self, needs: Preparation) -> Preparation:
        """``needs`` with sizes of large messages only."""
        received, sent = map(self._size_if_large, (needs.received_bytes, needs.sent_bytes))
        return Preparation(needs.edges, received_bytes=received, sent_bytes=sent, collectives=needs.collectives)

    def _size_if_large(self, size: float) -> float:
        """The size of messages that need a channel of their own, 0 for others."""
        has_channels = self.one_way and "gloo" in dist.get_backend(self.group)
        return size if has_channels and size >= GLOO_DETACHED_BYTES else 0

    def _channels_for(self, needs: Preparation) -> list[ChannelKey]:
        keys: list[ChannelKey] = []
        if not needs.received_bytes and not needs.sent_bytes:
            return keys
        from megatron_pp.comm.channels import channels_of

        for key in channels_of(self.rank, needs.edges):
            # Both ends of an edge know the same size: the sender as what it sends, the receiver as what it receives.
            source = key[0] if key[2] == ACT else key[1]
            if (needs.sent_bytes if source == self.rank else needs.received_bytes) > 0:
                keys.append(key)
        return keys

    def abort(self) -> None:
        super().abort()
        self._threads.interrupt("a rank of the pipeline has failed")

    def forget(self) -> None:
        self._threads.forget()

    def close(self) -> None:
        self._threads.close()
        super().close()

    def end(self) -> None:
        """Called when the program ends. Aborts unfinished transfers, which wakes their threads."""
        if self._threads.end():
            self.abort()
            self._threads.end()
