"""A two-rank process group for each one-way channel of a rank, made by its two members alone.

NCCL runs the operations of one communicator in posting order (pytorch#94819). On gloo a pair of ranks has one
connection per group, on which receives are announced behind large messages of the other direction.

``torch.distributed.new_group(use_local_synchronization=True)`` cannot make them: its members meet under a name that
contains how many groups each is in (``_hash_ranks_to_str``, torch 2.13), which differs between the ranks of a pipeline
of three or more. And where the default group is bound to a device, it splits that group, which is collective over all
its ranks. So the groups are made here, on the job's store, and ``close`` ends them. torch knows their global ranks, but
they are not in its tables of names (``pg_names``): those count in such names, so that groups which the program makes
later could not meet. NCCL's flight recorder takes name, description and ranks from the groups themselves.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from megatron_pp.comm.stores import private_client
from megatron_pp.comm.transport import ACT, GRAD, Edge
from megatron_pp.errors import CommunicatorClosedError, P2PTimeoutError, P2PTransferError

_SLICE = timedelta(seconds=0.1)  # a wait in the store is cut into these, and looks between them for an abort

ChannelKey = tuple[int, int, str]
"""(source, target, kind of message), ranks of the pipeline."""

SHAPES = "shapes"
"""The kind of message that travels on the CPU, both ways along one channel, whatever the backend of the others."""


class Channel(NamedTuple):
    """One end. ``peer``: the other end's rank in ``group``."""

    group: dist.ProcessGroup
    peer: int


def channels_of(rank: int, edges: Iterable[Edge], with_shapes: bool = False) -> list[ChannelKey]:
    """The channels of ``rank`` along ``edges``, in an order that is the same on all ranks."""
    keys = [key for s, t in sorted(edges) for key in ((s, t, ACT), (t, s, GRAD))]
    if with_shapes:
        keys += sorted({(min(edge), max(edge), SHAPES) for edge in edges})
    return [key for together in in_rounds(keys) for key in together if rank in key[:2]]


def in_rounds(keys: Iterable[ChannelKey]) -> list[list[ChannelKey]]:
    """``keys`` in rounds, such that a rank is an end at most once in a round: a colouring of the edges by first fit.

    If ranks make their channels in this order, a rank waits for at most one other in each round, and not for the whole
    pipeline. Neighbours in a loop need 4 rounds (6 if their number is odd), in a V 8."""
    rounds: list[list[ChannelKey]] = []
    busy: defaultdict[int, set[int]] = defaultdict(set)  # rank -> its rounds
    for key in keys:
        first = next(n for n in count() if n not in busy[key[0]] and n not in busy[key[1]])
        if first == len(rounds):
            rounds.append([])
        rounds[first].append(key)
        for rank in key[:2]:
            busy[rank].add(first)
    return rounds


class ChannelGroups:
    """The one-way channels of pipeline rank ``rank``, on gloo. ``name``: the pipeline's name in ``store``, which all
    ranks share; ``members``: its global ranks; ``options``: of the pipeline group's own backend.

    ``timeout`` is the pipeline group's. Groups on gloo keep the one with which they are made; transfers over them are
    waited for with a timeout of their own."""

    def __init__(self, store: dist.Store, name: str, rank: int, members: list[int], options: Any) -> None:
        self.store, self.name, self.rank, self.members, self.options = store, name, rank, members, options
        self.timeout: timedelta = options._timeout
        self.aborted = False
        self.channels: dict[ChannelKey, Channel] = {}
        self.collective: dist.ProcessGroup | None = None
        self._lock = threading.Lock()  # so that an abort from another thread sees every group that exists

    @cached_property
    def _client(self) -> dist.Store:
        """A client of its own: other threads may make the channels of other pipelines at the same time."""
        return private_client(self.store)

    def make(self, keys: Iterable[ChannelKey], patience: timedelta) -> list[ChannelKey]:
        """Make the missing channels of ``keys`` that this rank is an end of; returns their keys. Both ends call it, and
        wait for each other as long as ``patience``. ``keys`` must come in one order on all ranks (``in_rounds``)."""
        made = [key for key in keys if self.rank in key[:2] and key not in self.channels]
        for key in made:
            source, target, kind = key
            group = self._group((source, target), kind, f"channel {key}", patience)
            with self._lock:
                self.channels[key] = Channel(group, 1 if self.rank == source else 0)
            if self.aborted:
                end_late_groups([group], self.rank, f"channel {key}")
        return made

    def make_group(self, patience: timedelta) -> dist.ProcessGroup:
        """A group of all ranks of the pipeline, for collectives. All of them call it, and wait as in ``make``."""
        kind = "collectives"
        group = self._group(range(len(self.members)), kind, f"the group of {kind}", patience)
        with self._lock:
            self.collective = group
        if self.aborted:
            end_late_groups([group], self.rank, f"the group of {kind}")
        return group

    def abort(self) -> list[dist.ProcessGroup]:
        """Stop making channels; called from another thread. Returns the groups that exist, for the caller to abort."""
        with self._lock:
            self.aborted = True
            groups = [channel.group for channel in self.channels.values()]
            return groups + ([] if self.collective is None else [self.collective])

    def connect(
        self, kind: str, store: dist.Store, end: int, ranks: list[int], name: str, patience: timedelta
    ) -> dist.ProcessGroup:
        """Connect as rank ``end`` of a group of ``ranks`` of the whole job, called ``name``. Raises RuntimeError."""
        backend = dist.ProcessGroupGloo(store, end, len(ranks), patience)
        kind_of_backend = dist.ProcessGroup.BackendType.GLOO
        return group_around(backend, torch.device("cpu"), kind_of_backend, store, end, len(ranks))

    def follow_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def end(self, group: dist.ProcessGroup) -> None:
        """Shut ``group`` down, unless it was aborted. On gloo there is nothing to do."""

    def _group(self, ends: Sequence[int], kind: str, what: str, patience: timedelta) -> dist.ProcessGroup:
        """A group of ``ends``, ranks of the pipeline."""
        end, size = ends.index(self.rank), len(ends)
        between = "-".join(map(str, ends)) if size == 2 else "all"
        where = f"megatron_pp/channels/{self.name}/{between}-{kind}"
        # The nth attempt at this end meets the nth attempt at the other: keys of earlier attempts are not read.
        nth = self._client.add(f"{where}/made by {end}", 1)
        store = dist.PrefixStore(f"{where}/{nth}", self._client)
        for other in range(size):
            if other != end:
                self._meet_other_end(store, end, other, what, patience)
        name, ranks = f"{where}/{nth}", [self.members[one] for one in ends]
        try:
            group = self.connect(kind, store, end, ranks, name, patience)
        except RuntimeError as error:
            raise P2PTransferError(
                f"pipeline rank {self.rank}: {what} was not made within {patience.total_seconds():g} s "
                f"(config.p2p_timeout), though its other end had begun to make it: {error}"
            ) from error
        group._set_group_name(name)  # type: ignore[arg-type]
        group._set_group_desc(f"megatron_pp {kind} {between.replace('-', ' to ')}")
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}
        return group

    def _meet_other_end(self, store: dist.Store, end: int, other: int, what: str, patience: timedelta) -> None:
        """Wait in the store until the other end is there, because gloo and NCCL cannot be woken while they wait for it.
        Both ends answer: the other end may have left while it waited."""
        until = time.monotonic() + patience.total_seconds()
        for word in ("came", "answered"):
            store.set(f"end {end} {word} to {other}", "1")
            while not _is_set(store, f"end {other} {word} to {end}"):
                if self.aborted:
                    raise CommunicatorClosedError(f"pipeline rank {self.rank}: closed while {what} was being made")
                if time.monotonic() > until:
                    missing = "has not begun to make it" if word == "came" else "began to make it and then left"
                    raise P2PTimeoutError(
                        f"pipeline rank {self.rank}: the other end of {what} {missing}, after "
                        f"{patience.total_seconds():g} s (config.p2p_timeout)"
                    )

    def close(self) -> None:
        groups = [channel.group for channel in self.channels.values()]
        groups += [] if self.collective is None else [self.collective]
        self.channels.clear()
        self.collective = None
        for group in groups:
            dist.distributed_c10d._world.pg_group_ranks.pop(group, None)
            self.end(group)


def end_late_groups(groups: Iterable[dist.ProcessGroup], rank: int, what: str) -> NoReturn:
    """Abort ``groups`` that an abort has missed, because they were made after it had looked. On NCCL the communicator
    of a group is made later still, by its first operation. Raises CommunicatorClosedError."""
    from megatron_pp.comm import abort

    abort.abort_groups(groups)
    raise CommunicatorClosedError(f"pipeline rank {rank}: closed while {what} was being made")


def _is_set(store: dist.Store, key: str) -> bool:
    """Whether ``key`` is set, within a slice of time."""
    try:
        store.wait([key], _SLICE)
    except RuntimeError:  # timed out, or the store is gone; the next line raises if it is gone
        return store.check([key])
    return True


def group_around(
    backend: Any, device: torch.device, kind: Any, store: dist.Store, rank: int, size: int
) -> dist.ProcessGroup:
    """A group around ``backend``. The methods of the backend itself hold Python's interpreter lock while they work."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group
