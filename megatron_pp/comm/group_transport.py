"""Transfers over a ``torch.distributed`` process group: what gloo (``gloo/gloo_transport.py``) and NCCL
(``nccl/nccl_transport.py``) have in common."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from megatron_pp.comm.transport import ACT, GRAD, Preparation, Transport
from megatron_pp.common.finalizers import finalize_here
from megatron_pp.errors import P2PTransferError

if TYPE_CHECKING:
    from megatron_pp.comm.channels import Channel, ChannelGroups, ChannelKey
    from megatron_pp.comm.collectives import GroupCollectives

# gloo keeps messages of different tags apart. These numbers only have to differ from tags of users on the same group.
_TAGS = {ACT: 0x4D5001, GRAD: 0x4D5002}
_TAGS_OF_ONE_AGREEMENT = 0x100  # tags are 31 bits wide
_AGREEMENTS = 0x10000


class GroupTransport(Transport):
    """On NCCL, and on gloo where messages are large, each one-way channel has a process group of its own
    (``channels.py``), made when the plan's edges are known, never in the middle of a step (pytorch#129140,
    Megatron-LM#5240). Other channels share the given group, on gloo distinguished by tag."""

    shape_device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, one_way: bool) -> None:
        self.group, self.one_way = group, one_way
        self.rank, self.size = group.rank(), group.size()
        self.device = device_of(self.backend)
        # Made here, because construction is the one place that all members reach together.
        self.name = pipeline_name(group, self.backend, self.device)
        self._tags = self._base_tags = _TAGS
        self._agreement = 0
        self._prepared: set[Preparation] = set()
        self._groups: ChannelGroups | None = None
        self._channels: dict[ChannelKey, Channel] = {}
        self._collectives: GroupCollectives | None = None

    def prepare(self, needs: Preparation, timeout: timedelta) -> None:
        if self._groups is not None and self.limit != self._groups.timeout:
            # The timeout was changed (torch's ``_set_pg_timeout``, Megatron's ``update_pg_timeout``).
            self._groups.follow_timeout(self.limit)
        needs = self._what_counts(needs)
        if needs in self._prepared:
            return
        keys = self._channels_for(needs)
        made = self._own_groups().make(keys, timeout) if keys else []
        if needs.collectives and self._collectives is None:
            self._make_collectives(timeout)
        self._warm_up(needs, made)
        self._prepared.add(needs)

    def _what_counts(self, needs: Preparation) -> Preparation:
        """``needs`` without the fields that make no difference on this backend."""
        raise NotImplementedError

    def _channels_for(self, needs: Preparation) -> list[ChannelKey]:
        """The channels of this rank that ``needs`` asks for."""
        raise NotImplementedError

    def _warm_up(self, needs: Preparation, made: list[ChannelKey]) -> None:
        """Warm up the channels in ``made``, which are new."""

    def _own_groups(self) -> ChannelGroups:
        if self._groups is None:
            members = dist.get_process_group_ranks(self.group)
            self._groups = self.made_groups(self.store, self.name, self.rank, members, self._options)
            if self.aborted:  # another thread may have aborted before the line above
                self._groups.abort()
            self._channels = self._groups.channels
            # torch does not end these groups: they are closed with the transport, or when the program ends.
            self._close_groups = finalize_here(self, self._groups.close)
        return self._groups

    def made_groups(self, *of_pipeline: Any) -> ChannelGroups:
        from megatron_pp.comm.channels import ChannelGroups

        return ChannelGroups(*of_pipeline)

    def _make_collectives(self, timeout: timedelta) -> None:
        """Make and warm up the communicator for collectives of all ranks. Collective."""
        groups = self._own_groups()
        group = groups.make_group(timeout)
        from megatron_pp.comm.collectives import GroupCollectives

        self._collectives = made = GroupCollectives(group, lambda: groups.timeout)
        made.broadcast(torch.zeros(1, device=self.device), 0)
        self._end_if_aborted([group], "the group of collectives")

    def _end_if_aborted(self, groups: Iterable[dist.ProcessGroup], what: str) -> None:
        """Called after the first operation on ``groups``. Raises CommunicatorClosedError if there was an abort."""
        if self.aborted:
            from megatron_pp.comm.channels import end_late_groups

            end_late_groups(groups, self.rank, what)

    def _post_failed(self, error: RuntimeError, what: str) -> NoReturn:
        """Raise ``error`` as the failure of a transfer; subclasses such as out of memory are raised as they are."""
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise error
        raise P2PTransferError(f"pipeline rank {self.rank}, {what}: it cannot be posted: {error}") from error

    def use_agreement(self, number: int) -> None:
        """On gloo, tags keep the messages of different plans apart, because their shapes may differ. Ranks that run
        different plans then wait for each other, and the fault guard reports it. NCCL has no tags; there the guard
        detects it a moment later."""
        if number != self._agreement:
            self._agreement = number
            shift = number % _AGREEMENTS * _TAGS_OF_ONE_AGREEMENT
            self._tags = {kind: tag + shift for kind, tag in self._base_tags.items()}

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def abort(self) -> None:
        self.aborted = True
        made = [] if self._groups is None else self._groups.abort()
        from megatron_pp.comm import abort

        abort.abort_groups([self.group, *made])

    def close(self) -> None:
        if self._groups is not None:
            self._close_groups()
            self._groups = None

    def is_gone(self) -> bool:
        return self.group not in dist.distributed_c10d._world.pg_map

    @property
    def _options(self) -> Any:
        return self.group._get_backend(self.device).options

    @property
    def limit(self) -> timedelta:
        return self._options._timeout

    @property
    def store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()


def pipeline_name(group: dist.ProcessGroup, backend: str, device: torch.device) -> str:
    """A name that no two groups share: the global ranks of ``group`` and torch's name of it, as ``0-1 in group 3``.

    Members share torch's name for a group of ``new_group``, which is a number that counts the groups of the whole job.
    ``split_group`` (NCCL) hashes how many groups the rank is in, which may differ between members. So on NCCL the first
    member's name is broadcast over the group, which is collective."""
    names = [group.group_name]
    if backend == "nccl" and not names[0].isdecimal():
        dist.broadcast_object_list(names, src=dist.get_global_rank(group, 0), group=group, device=device)
    return f"{'-'.join(map(str, dist.get_process_group_ranks(group)))} in group {names[0]}"


def backend_of(group: dist.ProcessGroup) -> str:
    """``nccl`` or ``gloo``: the group's backend that carries the tensors. A mixed group uses NCCL if there is a GPU."""
    return "nccl" if "nccl" in dist.get_backend(group) and torch.cuda.is_available() else "gloo"


def device_of(backend: str) -> torch.device:
    """The device of the tensors that ``backend`` carries."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
