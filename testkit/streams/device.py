"""The virtual device of one rank: its host, streams, events and memory.

A rank's operations run at once, on the CPU. The device records which of them a GPU may run in another order.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from testkit.autograd_thread import carry
from testkit.streams.autograd_streams import NodeStreams
from testkit.streams.call_log import CallLog
from testkit.streams.hardware import HardwareQueues
from testkit.streams.host_process import HostProcess
from testkit.streams.kernels import Kernel
from testkit.streams.memory import (
    FREE,
    WRITE,
    Access,
    Block,
    CachingAllocator,
    Overwritten,
    StreamRace,
    Use,
)
from testkit.streams.rules import DeviceRules
from testkit.streams.timelines import Host, Lane, Timeline, join

_POOLED = 32  # streams that torch makes for each priority; after that it gives them out again

_here = threading.local()  # device: that of this thread's rank; quiet: whether nothing is recorded


def current_device() -> VirtualDevice | None:
    """The device of the rank that runs in this thread, None in other threads."""
    return getattr(_here, "device", None)


@contextmanager
def running_on(device: VirtualDevice) -> Iterator[None]:
    """A context in which this thread is the host of ``device``."""
    _here.device = device
    try:
        with device.process.main_thread():
            yield
    finally:
        _here.device = None


def _captured() -> Callable[[], AbstractContextManager[None]]:
    """Carries this thread's device to its autograd thread, as torch's device threads have chosen their device."""
    device = current_device()
    return nullcontext if device is None else partial(running_on, device)


carry(_captured)


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context in which this thread's operations belong to the simulation, not to the program."""
    before = is_quiet()
    _here.quiet = True
    try:
        yield
    finally:
        _here.quiet = before


@contextmanager
def simulating() -> Iterator[None]:
    """``unrecorded``, and without function modes: in this context the device handles tensors, not the program."""
    with unrecorded(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def is_quiet() -> bool:
    return getattr(_here, "quiet", False)


class Network(Protocol):
    """Connects the devices. ``timelines`` numbers the timelines of all devices. ``log`` records the hosts' calls.
    ``num_devices``: how many the machine has. With ``looks_for_races`` devices record the uses of memory."""

    timelines: Iterator[int]
    log: CallLog
    num_devices: int
    looks_for_races: bool
    rules: DeviceRules

    def launch(self, device: VirtualDevice, lane: Lane) -> None: ...

    def block(self, rank: int, ready: Callable[[], bool], what: str) -> None: ...


class VirtualDevice:
    """The device of ``rank``, on ``network``; ``process`` has its index."""

    def __init__(self, rank: int, network: Network, queues: HardwareQueues) -> None:
        self.rank = rank
        self.network = network
        self.log = network.log
        self.process = HostProcess(rank % network.num_devices, network.rules.queries_block, network.rules.context_lock)
        self.host = Host(next(network.timelines), rank, network.log)
        self.host.before_command = queues.issue
        self.default = Lane(next(network.timelines), "default stream", self.host)
        self.nodes = NodeStreams(self.default, self.record_stream, self.is_host_memory)
        self.tensors: AbstractContextManager[Any] | None = None  # the function mode of this rank's thread
        self.allocator = CachingAllocator(limit=network.rules.memory)
        self.ranges: list[str] = []  # open NVTX ranges; the engine's instruction is one of them
        self.races: dict[tuple[str, ...], StreamRace] = {}
        self.overwritten: dict[tuple[str, ...], Overwritten] = {}
        self.captured: list[Use] | None = None  # used by the graph that is being captured
        self.operations = 0
        self.kernels: set[Kernel] = set()  # loaded kernels
        self.slept = 0.0  # milliseconds in ``torch.cuda._sleep``
        self._pools: dict[bool, list[Lane]] = {False: [], True: []}
        self._turns = {False: itertools.count(), True: itertools.count()}
        self._blocks: dict[int, Block] = {}  # by address of the storage
        self._given_back: dict[int, int] = {}  # storages of graphs that have no memory of their own -> the owner
        self._graph_pools: dict[Any, CachingAllocator] = {}
        self._pool = self.allocator  # the pool that serves allocations
        self._host_blocks: set[int] = set()
        self._storages: dict[int, weakref.ref[Any]] = {}  # storages that call back when they are freed

    @property
    def place(self) -> torch.device:
        return torch.device("cuda", self.process.index)

    # -- streams -------------------------------------------------------------------------------------------------

    def pooled_stream(self, high_priority: bool = False) -> Lane:
        """The next of torch's pooled streams. NCCL's communicators also get their streams here."""
        at = next(self._turns[high_priority]) % _POOLED
        pool = self._pools[high_priority]
        if at == len(pool):
            name = f"{'high-priority ' if high_priority else ''}stream {at + 1}"
            pool.append(Lane(next(self.network.timelines), name, self.host))
        return pool[at]

    @property
    def lanes(self) -> list[Lane]:
        return [self.default, *self._pools[False], *self._pools[True]]

    @property
    def stream(self) -> Lane:
        """The current stream. Within a backward it is the stream of the running node."""
        return self.nodes.current()

    def block(self, ready: Callable[[], bool], what: str) -> None:
        """The host waits until ``ready()``."""
        self.process.asks(what)
        with self.process.waits_for_device():
            self.network.block(self.rank, ready, what)

    def stream_step(self, what: str) -> Timeline:
        """The host issues an operation to the current stream."""
        self.process.waits_for_context()
        stream = self.nodes.of_next_operation()
        stream.issue()
        self.network.launch(self, stream)
        self.log.launch(self.rank, stream.number, what)
        self.operations += 1
        return stream

    def launches(self, kernel: Kernel | None) -> None:
        """The host launches ``kernel``. The first launch loads the kernel."""
        if kernel is None or kernel in self.kernels or not self.network.rules.first_launches:
            return
        self.kernels.add(kernel)
        if self.captured is None:
            self.wait_until_idle(f"the first launch of {kernel.operation}")

    def wait_until_idle(self, what: str) -> None:
        """A call of CUDA waits, under the context's lock, for all that this process has issued. The program must not
        rely on this order."""
        with self.process.holds_context():
            pending = set().union(*(lane.unfinished() for lane in self.lanes))
            self.block(lambda: all(work.finished for work in pending), what)

    def host_step(self, what: str) -> Timeline:
        """The host does an operation on its own memory."""
        self.host.work()
        self.log.launch(self.rank, self.host.number, what)
        return self.host

    def synchronize(self, lanes: list[Lane], what: str) -> None:
        """The host waits for all operations issued on ``lanes``."""
        pending = set().union(*(lane.unfinished() for lane in lanes))
        self.block(lambda: all(work.finished for work in pending), what)
        for lane in lanes:
            for work in pending:
                join(lane.clock, work.end)
            self.host.learn(lane.clock, lane.record())

    # -- memory --------------------------------------------------------------------------------------------------

    def is_host_memory(self, tensor: torch.Tensor) -> bool:
        return bool(self._host_blocks) and tensor.untyped_storage()._cdata in self._host_blocks

    def keep_on_host(self, storage: Any) -> None:
        """Record that the new ``storage`` is in host memory."""
        key = storage._cdata
        if key not in self._blocks and key not in self._host_blocks:
            self._host_blocks.add(key)
            block = self._blocks[key] = Block(0, storage.nbytes(), self.host)
            self.log.allocate(self.rank, block, storage.nbytes(), self.host.number)
            self._storages[key] = weakref.ref(storage, lambda gone: self._forget_host(key))

    def block_of(self, storage: Any) -> Block:
        """The block of ``storage``. If the storage is new, the block is allocated on the current stream."""
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            stream, pool = self.stream, self._pool
            if not is_quiet() and not pool.has_room(storage.nbytes(), stream):
                self._give_cached_memory_back(storage.nbytes())
            block = self._blocks[key] = pool.allocate(storage.nbytes(), stream, stream.now)
            if block.owner == 0 or not pool.of_graphs:
                nbytes = block.nbytes if pool.of_graphs else storage.nbytes()
                self.log.allocate(self.rank, block, nbytes, stream.number)
            self._storages[key] = weakref.ref(storage, lambda gone: self._free(key))
        return block

    def _give_cached_memory_back(self, wanted: int) -> None:
        """Return cached blocks to the device, as ``release_cached_blocks`` of torch's allocator does. It waits for the
        events of freed blocks that ``record_stream`` marked, then calls ``cudaFree`` for cached blocks, which waits
        until the device is idle. Raises OutOfMemoryError if ``wanted`` bytes are still not free."""
        allocator = self.allocator
        with self.process.holds_context():
            self.block(allocator.events_are_over, "the events of blocks that record_stream marked")
        if allocator.has_cached_blocks():
            self.wait_until_idle("cudaFree of cached blocks")
            allocator.drop_cached_blocks()
        if not allocator.has_room(wanted, self.stream):
            raise torch.OutOfMemoryError(f"rank {self.rank}: {wanted} bytes of {allocator.limit} are not free")

    def access(self, tensor: torch.Tensor, kind: str, lane: Timeline, what: str) -> None:
        """Record that the last operation on ``lane`` reads or writes ``tensor``. ``kind`` says which."""
        count = tensor.numel()
        if not count or not self.network.looks_for_races:
            return
        storage = tensor.untyped_storage()
        block = self.block_of(storage)
        size = tensor.element_size()
        first = int(tensor.storage_offset())
        if not tensor.is_contiguous():
            count = 1 + sum(int((n - 1) * stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        owner = self._given_back.get(storage._cdata, block.owner) if self._given_back else block.owner
        use = Use(block, owner, kind, first * size, (first + count) * size)
        if self.captured is None:
            self.use(use, lane, what)
        else:
            self.captured.append(use)

    def use(self, use: Use, lane: Timeline, what: str) -> None:
        """Record that the last operation on ``lane`` does ``use``."""
        block, owner, kind, start, stop = use
        self.log.access(self.rank, block, start, stop, kind == WRITE)
        access = self._step(kind, what, lane, owner)
        for race in block.use(access, start, stop, lane.clock):
            key = (race.kind, race.first.what, race.first.instruction, race.second.what, race.second.instruction)
            self.races.setdefault(key, race)
        found = block.follow(access) if block.of_graphs else None
        if found is not None:
            places = (what, access.instruction, found.write.what, found.write.instruction)
            self.overwritten.setdefault(places, found)

    def record_stream(self, tensor: torch.Tensor, lane: Lane) -> None:
        if self.network.looks_for_races:
            block = self.block_of(tensor.untyped_storage())
            block.recorded.add(lane)
            self.log.record_stream(self.rank, block, lane.number)

    def _step(self, kind: str, what: str, lane: Timeline, owner: int) -> Access:
        instruction = self.ranges[-1] if self.ranges else ""
        return Access(kind, what, self.rank, instruction, lane, lane.clock[lane.number], owner)

    # -- memory of graphs ----------------------------------------------------------------------------------------

    @contextmanager
    def allocating(self, pool: Any) -> Iterator[None]:
        """A context in which memory comes from ``pool``, a pool of graphs."""
        before, self._pool = self._pool, self._graph_pools.setdefault(pool, CachingAllocator(of_graphs=True))
        try:
            yield
        finally:
            self._pool = before

    def give_back(self, tensor: torch.Tensor) -> None:
        """Let the pool give the memory of ``tensor`` to graphs that are captured later. The tensor keeps its
        address."""
        key = tensor.untyped_storage()._cdata
        block = self._blocks[key]
        self._given_back[key] = block.owner
        assert block.pool is not None
        block.pool.free(block, self._step(FREE, "the host", self.host, block.owner), lambda: True)

    def _free(self, key: int) -> None:
        """Called when the storage ``key`` is freed, in the thread that has dropped it."""
        block = self._blocks.pop(key)
        del self._storages[key]
        assert block.pool is not None
        if block.of_graphs:
            if self._given_back.pop(key, None) is None:
                block.pool.free(block, self._step(FREE, "the host", self.host, block.owner), lambda: True)
            return
        lanes = [lane for lane in self.lanes if lane in block.recorded] if block.recorded else []
        clocks = [(dict(lane.now()), lane.record()) for lane in lanes]
        pending = set().union(*(lane.unfinished() for lane in lanes))
        self.log.free(self.rank, block)

        def done() -> bool:
            if not all(work.finished for work in pending):
                return False
            for clock, event in [*clocks, *((work.end, 0) for work in pending)]:
                self.host.learn(clock, event)
            return True

        block.pool.free(block, self._step(FREE, "the host", self.host, block.owner), done)

    def _forget_host(self, key: int) -> None:
        del self._storages[key]
        self._host_blocks.discard(key)
        self.log.free(self.rank, self._blocks.pop(key))
