"""A two-rank process group for each one-way channel of a rank, made by its two members alone.

NCCL runs the operations of one communicator in posting order (pytorch#94819). On gloo a pair of ranks has one
connection per group, on which receives are announced behind large messages of the other direction.

``torch.distributed.new_group(use_local_synchronization=True)`` cannot make them: its members meet under a name that
contains how many groups each is in (``_hash_ranks_to_str``, torch 2.13), which differs between the ranks of a pipeline
of three or more. And where the default group is bound to a device, it splits that group, which is collective over all
its ranks. So the groups are made here, on the job's store; torch knows nothing of them, and ``close`` ends them.
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

    ``timeout``: of the groups on NCCL. Those on gloo keep the timeout with which they are made; their transfers are
    waited for with a timeout of their own.
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
        """Make those of ``keys`` that this rank is an end of and that are missing; returns them. Both ends call it, and
        wait for each other as long as ``patience``. ``keys`` must come in one order on all ranks.
        """
        made = [key for key in keys if self.rank in key[:2] and key not in self.channels]
        for key in made:
            self.channels[key] = self._make(key, patience)
        return made

    def _make(self, key: Key, patience: timedelta) -> Channel:
        source, target, kind = key
        end = 0 if self.rank == source else 1
        where = f"megatron_pp/channels/{self.name}/{source}-{target}-{kind}"
        # The nth time at this end meets the nth time at the other: keys of an earlier time are not read.
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
        """gloo and NCCL wait for the other end without a way to be woken, so it must be there before they begin. It
        answers as well: it may have left while it waited."""
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
        """Shut the groups down, unless they were aborted."""
        channels = list(self.channels.values())
        self.channels.clear()
        for channel in channels:
            if self.backend == "nccl" and not self.aborted:
                try:
                    channel.group.shutdown()
                except RuntimeError as error:  # the program goes on, or ends, without it
                    logger.warning("closing an NCCL communicator: %s", error)


def pipeline_name(group: dist.ProcessGroup, backend: str, device: torch.device) -> str:
    """The global ranks of ``group`` and torch's name of it: ``0-1 in group 3``; differs between any two groups.

    Members share torch's name for a group of ``new_group``, numbered in the order in which all ranks of the job make
    groups. ``split_group`` (NCCL) hashes how many groups the rank is in, which may differ between members. There the
    first member's name counts, broadcast over the group: collective.
    """
    names = [group.group_name]
    if backend == "nccl" and not names[0].isdecimal():
        dist.broadcast_object_list(names, src=dist.get_global_rank(group, 0), group=group, device=device)
    return f"{'-'.join(map(str, dist.get_process_group_ranks(group)))} in group {names[0]}"


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
