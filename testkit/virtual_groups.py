"""torch.distributed for ranks that are threads: process groups of backend "nccl" between virtual devices.

``process_group`` makes the calling thread a member of a job of ``network.size`` ranks. The transport for NCCL, its
channels (``ProcessGroupNCCL``), batches and aborts then run unchanged. Communicators connect through the store at their
first operation, as in NCCL. So the ranks must run freely (``StreamNetwork(..., seed=None)``).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_pp.testing.memory_transport import End
from testkit.streams.device import current_device
from testkit.streams.network import StreamNetwork, StreamWork
from testkit.streams.torch_calls.cuda import replaced
from testkit.streams.torch_calls.cuda_tensors import CPU

_IDS = itertools.count()
_THREAD_BLOCKS = 32  # thread blocks of a communicator without a setting, as for NCCL on Hopper
_REDUCTIONS: dict[Any, Any] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
_batch_of_torch = dist.batch_isend_irecv


class _Options(SimpleNamespace):
    """``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False, for_device: bool = False) -> None:
        super().__init__(
            for_device=for_device,
            is_high_priority_stream=is_high_priority_stream,
            _timeout=timedelta(minutes=10),
            group_name="",
            global_ranks_in_group=[],
            config=SimpleNamespace(max_ctas=None, min_ctas=None, blocking=None),
        )


class _Communicator(NamedTuple):
    """A communicator. ``members``: rank in the group -> rank in the job."""

    name: str
    members: dict[int, int]


class VirtualNCCL:
    """``ProcessGroupNCCL``: its rank's end of each of its communicators."""

    Options = _Options
    supports_coalescing = True
    supports_splitting = True

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        device = current_device()
        assert device is not None, "communicators are made by the threads of ranks"
        assert isinstance(device.network, StreamNetwork)
        self.device = device
        self.network = device.network
        self.store = store
        self.rank = rank
        self.size = size
        self.options = options or _Options()
        self.is_aborted = False
        self._communicators: dict[tuple[int, ...], _Communicator] = {}  # ranks in the group -> communicator

    def name(self) -> str:
        return "nccl"

    def post(self, requests: Sequence[tuple[bool, torch.Tensor, int]]) -> StreamWork:
        """Post (is_send, tensor, peer's rank in the group) requests. Several are one operation of the whole group."""
        return self._post(requests, tuple(range(self.size)))

    def post_alone(self, is_send: bool, tensor: torch.Tensor, peer: int) -> StreamWork:
        """Post a send or receive that is not in a batch. The two ranks have their own communicator for it, unless the
        group was made for a device (``device_id``; pytorch#154132)."""
        pair = (min(self.rank, peer), max(self.rank, peer))
        return self._post([(is_send, tensor, peer)], tuple(range(self.size)) if self.options.for_device else pair)

    def _post(self, requests: Sequence[tuple[bool, torch.Tensor, int]], ranks: tuple[int, ...]) -> StreamWork:
        if self.is_aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        if ranks not in self._communicators:
            self._communicators[ranks] = self._connect(ranks)
        name, members = self._communicators[ranks]
        ends = []
        for is_send, tensor, peer in requests:
            mine, other = members[self.rank], members[peer]
            ends.append(End(tensor, (mine, other, name) if is_send else (other, mine, name), is_send))
        blocks = self.options.config.max_ctas or _THREAD_BLOCKS
        queue = (name, self.device.rank)
        priority = self.options.is_high_priority_stream
        return self.network.post(self.device.rank, queue, ends, priority, blocks)

    def _connect(self, ranks: tuple[int, ...]) -> _Communicator:
        """Make a communicator. Collective, like ncclCommInitRank: the host waits for all of ``ranks``."""
        where = "-".join(map(str, ranks))
        self.store.set(f"{where}: member {self.rank}", str(self.device.rank))
        if self.rank == ranks[0]:
            self.store.set(f"{where}: id", f"{self.options.group_name or 'communicator'} {next(_IDS)}")
        members = {rank: int(self._get(f"{where}: member {rank}")) for rank in ranks}
        return _Communicator(self._get(f"{where}: id"), members)

    def _get(self, key: str) -> str:
        while not self.store.check([key]):
            if self.is_aborted or self.network.failure is not None:
                raise dist.DistBackendError("NCCL communicator was aborted while it was made")
            time.sleep(0.002)
        return self.store.get(key).decode()

    def abort(self) -> None:
        self.device.process.waits_for_context()
        self.is_aborted = True
        for name, _ in self._communicators.values():
            self.network.abort_communicator(name, self.device.rank)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def shutdown(self) -> None:
        """Does nothing: no resource is open."""


class _Done(dist._Work):
    """The work of an operation for which the current stream already waits."""

    def __init__(self) -> None:
        super().__init__()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class VirtualGroup(dist.ProcessGroup):
    """``ProcessGroup`` over a ``VirtualNCCL``, or for tensors in host memory over torch's own gloo."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._backends: dict[str, Any] = {}  # type of device -> backend
        self._name = self._desc = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_default_backend(self, kind: Any) -> None:
        """Does nothing: there is only one backend."""

    def _register_backend(self, device: torch.device, kind: Any, backend: Any = None) -> None:
        self._backends[device.type] = backend

    def _get_backend(self, device: torch.device) -> Any:
        # A tensor of a virtual device is in host memory, and torch's own code asks for the backend of that.
        found = self._backends.get(device.type) or self._backends.get("cuda")
        if found is None:
            raise RuntimeError(f"no backend for {device}")
        return found

    @property
    def backend(self) -> VirtualNCCL:
        return self._get_backend(torch.device("cuda"))

    def _is_for_gloo(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in host memory. ``Tensor.is_cuda`` cannot be used: within torch's own functions it is
        the real one."""
        if CPU.type not in self._backends:
            return False
        return "cuda" not in self._backends or self.backend.device.is_host_memory(tensor)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if self._is_for_gloo(tensors[0]):
            return self._backends["cpu"].send(tensors, peer, tag)
        return self.backend.post_alone(True, tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if self._is_for_gloo(tensors[0]):
            return self._backends["cpu"].recv(tensors, peer, tag)
        return self.backend.post_alone(False, tensors[0], peer)

    # Collectives exchange the tensors of all members. This is more than NCCL sends, but it is the same for streams.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        kind = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        combine = next(function for name, function in _REDUCTIONS.items() if kind == name)
        for tensor in tensors:
            for theirs in self._exchange(tensor):
                combine(tensor, theirs, out=tensor)
        return _Done()

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Reduce to one rank. The other ranks' tensors are undefined afterwards."""
        return self.allreduce(tensors)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        mine = tensor.clone()
        self.allreduce([mine])
        output.copy_(mine.view(-1).chunk(self.size())[self.rank()].view_as(output))
        return _Done()

    reduce_scatter_single = _reduce_scatter_base  # the name from torch 2.13 on

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None) -> Any:
        everyone = self._exchange(tensors[0])
        everyone.insert(self.rank(), tensors[0])
        for output, tensor in zip(outputs[0], everyone, strict=True):
            output.copy_(tensor)
        return _Done()

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Gather into one tensor. Before torch 2.15 its name is ``_allgather_base``."""
        return self.allgather([list(output.view(-1).chunk(self.size()))], [tensor.view(-1)])

    _allgather_base = all_gather_single

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, to: list[int], of: list[int], opts: Any = None
    ) -> Any:
        """Exchange equal parts. In other releases of torch its name is ``alltoall_base``."""
        everyone = self._exchange(tensor)
        everyone.insert(self.rank(), tensor)
        for mine, theirs in zip(output.chunk(self.size()), everyone, strict=True):
            mine.copy_(theirs.chunk(self.size())[self.rank()])
        return _Done()

    alltoall_base = all_to_all_single

    def gather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any) -> Any:
        if self.rank() == opts.rootRank:
            return self.allgather(outputs, tensors)
        self._exchange(tensors[0])
        return _Done()

    def scatter(self, outputs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any) -> Any:
        root = self.rank() == opts.rootRank
        mine = torch.cat(tensors[0]) if root else torch.cat([torch.zeros_like(outputs[0])] * self.size())
        everyone = self._exchange(mine)
        everyone.insert(self.rank(), mine)
        outputs[0].copy_(everyone[opts.rootRank].chunk(self.size())[self.rank()])
        return _Done()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        peers = [rank for rank in range(self.size()) if rank != self.rank()]
        if not peers:
            return _Done()
        if self.rank() == opts.rootRank:
            return self.backend.post([(True, tensors[0], peer) for peer in peers])
        return self.backend.post([(False, tensors[0], opts.rootRank)])

    def barrier(self, opts: Any = None) -> Any:
        """A barrier for which the host waits, as in ProcessGroupNCCL."""
        self.allreduce([torch.zeros(1)])
        self.backend.device.synchronize([self.backend.device.stream], "a barrier")
        return _Done()

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        peers = [rank for rank in range(self.size()) if rank != self.rank()]
        theirs = [torch.empty_like(mine) for _ in peers]
        if peers:
            sends = [(True, mine, peer) for peer in peers]
            receives = [(False, tensor, peer) for tensor, peer in zip(theirs, peers, strict=True)]
            self.backend.post([*sends, *receives]).wait()
        return theirs

    def abort(self) -> None:
        for backend in self._backends.values():
            backend.abort()

    def shutdown(self) -> None:
        for backend in self._backends.values():
            backend.shutdown()


class _WorldPerThread:
    """``torch.distributed``'s tables of process groups, separate for each thread."""

    def __init__(self) -> None:
        object.__setattr__(self, "_local", threading.local())

    def _mine(self) -> Any:
        local = self._local
        if not hasattr(local, "world"):
            local.world = c10d._World()
            # This rank's groups, None for those of other ranks, because all threads share torch's tables.
            local.world.made = []
        return local.world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)


def _batch_isend_irecv(ops: list[Any]) -> list[Any]:
    group = ops[0].group
    if not isinstance(group, VirtualGroup):
        return _batch_of_torch(ops)
    return [group.backend.post([(op.op is dist.isend, op.tensor, op.group_peer) for op in ops])]


@contextmanager
def virtual_distributed() -> Iterator[None]:
    """A context with ``torch.distributed`` for threads that are ranks. Use it within ``virtual_cuda``."""
    with replaced(
        [
            (c10d, "_world", _WorldPerThread()),
            (dist, "ProcessGroup", VirtualGroup),
            (dist, "ProcessGroupNCCL", VirtualNCCL),
            (dist, "batch_isend_irecv", _batch_isend_irecv),
            (dist, "init_process_group", _init_process_group),
            (dist, "destroy_process_group", _destroy_process_group),
            (dist, "new_group", _new_group),
            (dist, "split_group", _split_group),
        ]
    ):
        try:
            yield
        finally:
            _forget_groups()


def _forget_groups() -> None:
    """Remove the groups of ranks that still wait. All threads share torch's tables, and the next group must not have
    their names."""
    world: Any = c10d._World()
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        for group in [one for one in list(table) if isinstance(one, VirtualGroup)]:
            table.pop(group, None)


@contextmanager
def process_group(
    network: StreamNetwork, rank: int, store: Any, device_id: torch.device | None = None
) -> Iterator[dist.ProcessGroup]:
    """A context with the job's default group in the thread of ``rank``. ``store``: one ``HashStore`` for all ranks."""
    _init_process_group("nccl", store=store, rank=rank, world_size=network.size, device_id=device_id)
    try:
        yield c10d._get_default_group()
    finally:
        _destroy_process_group()


def _init_process_group(
    backend: str, *, store: Any = None, rank: int = 0, world_size: int = 1, timeout: Any = None, device_id: Any = None
) -> None:
    """``torch.distributed.init_process_group`` in the thread of a rank."""
    assert backend == "nccl", "a virtual device has no other"
    store = dist.HashStore() if store is None and world_size == 1 else store
    c10d._world.default_pg = _join(range(world_size), rank, store, _Options(for_device=device_id is not None))


def _new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.distributed.new_group``. All ranks of the job make all groups, in the same order."""
    world: Any = c10d._world
    store = world.pg_map[world.default_pg][1]
    mine = world.default_pg.rank()
    members = range(world.default_pg.size()) if ranks is None else sorted(ranks)
    if mine in members:
        return _join(members, mine, store, _Options(for_device=world.default_pg.backend.options.for_device))
    world.made.append(None)
    return dist.GroupMember.NON_GROUP_MEMBER


def _split_group(parent_pg: Any = None, split_ranks: Sequence[Sequence[int]] = (), **_: Any) -> Any:
    """``torch.distributed.split_group``: all ranks of ``parent_pg`` make one of the groups each, at the same time."""
    world: Any = c10d._world
    parent = parent_pg or world.default_pg
    every = list(world.pg_group_ranks[parent])
    mine = parent.rank()
    ranks = next((ranks for ranks in split_ranks if mine in ranks), None)
    if ranks is None:
        world.made.append(None)
        return dist.GroupMember.NON_GROUP_MEMBER
    members = [every[rank] for rank in ranks]
    options = _Options(for_device=parent.backend.options.for_device)
    return _join(members, every[mine], world.pg_map[world.default_pg][1], options, f" of {members}")


def _join(members: Sequence[int], rank: int, store: Any, options: _Options, suffix: str = "") -> VirtualGroup:
    """Join a group. ``members``: the ranks of the job that are in it. ``suffix``: of its name, which no other group
    has."""
    world: Any = c10d._world
    name = f"{len(world.made)}{suffix}"
    place = members.index(rank)
    group = VirtualGroup(store, place, len(members))
    backend = VirtualNCCL(dist.PrefixStore(f"group {name}", store), place, len(members), options)
    group._register_backend(torch.device("cuda"), None, backend)
    group._set_group_name(name)
    world.made.append(group)
    world.pg_map[group] = ("nccl", store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = "cpu:nccl,cuda:nccl"
    world.pg_group_ranks[group] = {member: number for number, member in enumerate(members)}
    return group


def _destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroy one group, or all."""
    world: Any = c10d._world
    everything = group is None or group is world.default_pg
    for one in world.made if everything else [group]:
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table.pop(one, None)
    if everything:
        world.default_pg = None
        world.made.clear()
