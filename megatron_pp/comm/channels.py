"""A two-rank process group for each one-way channel of a rank, made by its two members alone.

On NCCL because the operations of one communicator run in the order in which they were posted (pytorch#94819). On gloo,
for large messages, because a pair of ranks has one connection in a group: what goes one way, and the announcements of
receives, wait for what goes the other way.

``torch.distributed.new_group(use_local_synchronization=True)`` cannot make them: the name under which the members
meet contains the number of groups that each of them is in already, which differs between the ranks of a pipeline of
three or more (``_hash_ranks_to_str``, torch 2.13), so that they wait for each other under two names; and where the
default group is bound to a device it splits that group, in which all of its ranks would have to take part. So the
groups are made here, on the job's store; torch knows nothing of them, and ``close`` ends them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_pp.errors import CommunicatorClosedError, P2PTimeoutError, P2PTransferError

_POLL = 0.002  # seconds
logger = logging.getLogger("megatron_pp")

Key = tuple[int, int, str]
"""(source, target, kind of message), ranks of the pipeline."""


class Channel(NamedTuple):
    """One end. ``peer``: the other end's rank in ``group``."""

    group: dist.ProcessGroup
    peer: int


class ChannelGroups:
    """The one-way channels of pipeline rank ``rank``. ``name``: of the pipeline on ``store``, which all ranks share.

    ``timeout``: of the groups on NCCL. Those on gloo have the time that was given to make them, which cannot be changed
    afterwards; so their transfers are waited for with a timeout of their own.
    """

    def __init__(self, backend: str, store: dist.Store, name: str, rank: int, timeout: timedelta) -> None:
        self.backend = backend
        self.store = store
        self.name = name
        self.rank = rank
        self.timeout = timeout
        self.aborted = False
        self.channels: dict[Key, Channel] = {}

    def make(self, keys: Iterable[Key], patience: timedelta) -> list[Key]:
        """Make those of ``keys`` that this rank is an end of and that are not there yet; returns them. Both ends call
        it: a channel's creation waits for the other end, for as long as ``patience``. ``keys`` must come in one order
        on all ranks.
        """
        made = [key for key in keys if self.rank in key[:2] and key not in self.channels]
        for key in made:
            self.channels[key] = self._make(key, patience)
        return made

    def _make(self, key: Key, patience: timedelta) -> Channel:
        source, target, kind = key
        end = 0 if self.rank == source else 1
        where = f"megatron_pp/channels/{self.name}/{source}-{target}-{kind}"
        # The nth time that this end makes the channel meets the nth time of the other end: nothing stale is met.
        nth = self.store.add(f"{where}/made by {end}", 1)
        store = dist.PrefixStore(f"{where}/{nth}", self.store)
        self._meet_other_end(store, end, key, patience)
        try:
            if self.backend == "nccl":
                group = _nccl(store, end, self.timeout, f"pp_{kind}_{source}_{target}")
            else:
                group = _gloo(store, end, patience)
        except RuntimeError as error:
            raise P2PTransferError(
                f"pipeline rank {self.rank}: channel {key} was not made within {patience.total_seconds():g} s "
                f"(config.p2p_timeout), though its other end had begun to make it: {error}"
            ) from error
        return Channel(group, 1 - end)

    def _meet_other_end(self, store: dist.Store, end: int, key: Key, patience: timedelta) -> None:
        """gloo and NCCL wait for the other end where no one can wake them. So it has come before they are asked, and
        has answered since this one came: it may have left while it waited."""
        until = time.monotonic() + patience.total_seconds()
        for word in ("came", "answered"):
            store.set(f"end {end} {word}", "1")
            while not store.check([f"end {1 - end} {word}"]):
                if self.aborted:
                    raise CommunicatorClosedError(
                        f"pipeline rank {self.rank}: closed while channel {key} was being made"
                    )
                if time.monotonic() > until:
                    missing = "has not begun to make it" if word == "came" else "began to make it and then left"
                    raise P2PTimeoutError(
                        f"pipeline rank {self.rank}: the other end of channel {key} {missing}, after "
                        f"{patience.total_seconds():g} s (config.p2p_timeout)"
                    )
                time.sleep(_POLL)

    def close(self) -> None:
        """Give everything back, but for communicators that were aborted: those are gone already."""
        channels = list(self.channels.values())
        self.channels.clear()
        for channel in channels:
            if self.backend == "nccl" and not self.aborted:
                try:
                    channel.group.shutdown()
                except RuntimeError as error:  # the program goes on, or ends, without it
                    logger.warning("closing an NCCL communicator: %s", error)


def _gloo(store: dist.Store, rank: int, timeout: timedelta) -> dist.ProcessGroup:
    backend = dist.ProcessGroupGloo(store, rank, 2, timeout)
    return _group_of(backend, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, store, rank)


def _nccl(store: dist.Store, rank: int, timeout: timedelta, name: str) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if hasattr(options, "group_name"):  # for torch's flight recorder
        options.group_name = name  # type: ignore[assignment]
    backend = dist.ProcessGroupNCCL(store, rank, 2, options)
    device = torch.device("cuda", torch.cuda.current_device())
    return _group_of(backend, device, dist.ProcessGroup.BackendType.NCCL, store, rank)


def _group_of(backend: Any, device: torch.device, kind: Any, store: dist.Store, rank: int) -> dist.ProcessGroup:
    """A group around ``backend``, whose own methods would hold Python's interpreter lock while they work."""
    group = dist.ProcessGroup(store, rank, 2)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group
