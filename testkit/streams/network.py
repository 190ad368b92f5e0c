"""Point-to-point transfers between virtual devices, with NCCL's stream semantics.

Posting makes the communicator's stream wait for the current one. The operations of a communicator run in posting order,
and a batch is one operation. A matched transfer orders both ranks. ``wait`` makes the current stream wait, not the
host. ``is_completed`` queries whether the device is done. A transfer keeps nothing alive, like a DMA engine.

The bytes are copied when both ends are at the head of their queues. After a wait the program uses the bytes, so the
thread of the rank stops in ``wait`` until they are there, although a real host would continue. With ``run_ahead``
nothing reads the bytes, and the thread does not stop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from megatron_pp.testing.adversarial_transports import Window, WindowNetwork
from megatron_pp.testing.memory_transport import End, MemoryTransport, MemoryWork, Queue
from testkit.streams.call_log import CallLog
from testkit.streams.device import VirtualDevice, running_on, simulating
from testkit.streams.eager import SLOTS, Buffered, buffered
from testkit.streams.hardware import HardwareQueues, Kernel, begin
from testkit.streams.memory import READ, WRITE
from testkit.streams.rules import DeviceRules
from testkit.streams.timelines import Clock, Lane, Transfer, join
from testkit.streams.torch_calls.recorder import recording
from testkit.streams.waiting import OwnConditions, on_one_core

NO_MORE_RULES = DeviceRules()
# By seed: the probability that polling finds a transfer done that the host cannot know to be done.
_HASTE = (0.0, 0.5, 1.0)


class StreamWork(MemoryWork):
    """One posted operation. ``needs``: transfers that must finish before it starts. ``end``: the clock after it, once
    it has met its peers."""

    def __init__(
        self, network: StreamNetwork, device: VirtualDevice, queue: Queue, ends: list[End], lane: Lane
    ) -> None:
        super().__init__(network, device.rank, queue, ends)
        self.network: StreamNetwork = network
        self.device = device
        self.what = " and ".join(map(_words, ends))
        current = device.stream
        lane.wait_for(current.now(), current.unfinished())
        lane.issue()
        self.event = network.log.post(device.rank, lane.number, current.number, self.what, len(ends))
        self.end: Clock = dict(lane.clock)
        self.needs: set[Transfer] = set(lane.unfinished())
        self.partners: list[StreamWork] = []
        self.thread_blocks = 0
        self.has_begun = self.finished = False
        lane.pending.add(self)

    def is_completed(self) -> bool:
        return self.network.is_completed(self)


class StreamNetwork(WindowNetwork):
    """``size`` virtual devices and their connections.

    seed            schedules the ranks, one at a time, so that a run repeats exactly. If it is divisible by three,
                    polling finds a transfer done as late as possible, otherwise earlier. None: the ranks run freely,
                    for the fault guard and its store
    record_streams  posting calls ``record_stream`` on the tensors that it sends or receives, as ProcessGroupNCCL does
    run_ahead       the host never waits for a transfer: data that has not arrived is NaN. Races are not checked
    rules           further rules of the devices
    held            a function that says whether a transfer that could finish does not; call ``progress`` when its
                    answer changes
    log             records the calls of the ranks to their devices
    looks_for_races  False: uses of memory are not recorded
    """

    def __init__(
        self,
        size: int,
        one_way: bool = True,
        *,
        seed: int | None = 0,
        record_streams: bool = False,
        run_ahead: bool = False,
        rules: DeviceRules = NO_MORE_RULES,
        store: Any = None,
        log: CallLog | None = None,
        looks_for_races: bool = True,
    ) -> None:
        super().__init__(size, one_way, store, seed)
        self.looks_for_races = looks_for_races
        self.changed = OwnConditions()
        self.log = CallLog(keeps=False) if log is None else log
        self.run_ahead = run_ahead
        self.held: Callable[[StreamWork], bool] = lambda work: False
        self.haste = _HASTE[(seed or 0) % len(_HASTE)]
        self.record_streams = record_streams
        self.timelines: Iterator[int] = itertools.count()
        self.rules = rules
        self.num_devices = 1 if rules.one_device else size
        queues = [HardwareQueues(rules.hardware_queues, seed or 0) for _ in range(size)]
        self.devices = [VirtualDevice(rank, self, queues[rank]) for rank in range(size)]
        self._lanes: dict[Queue, Lane] = {}
        self._done: dict[Queue, Clock] = {}
        self._unfinished: list[Any] = []  # transfers in the order of issue, and with limited room also kernels

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """A context in which this thread is the host of ``rank``. At its end it raises RuntimeError if a thread of the
        process has made a context on another device."""
        device = self.devices[rank]
        records = recording(device, checks=not self.run_ahead)
        with on_one_core(), running_on(device), records, super().running(rank):
            yield
            if self.rules.may_hang:
                device.synchronize(device.lanes, "the end of its program")
            if device.process.contexts:
                raise RuntimeError(f"rank {rank}: {'; '.join(device.process.contexts.values())}")

    # -- what a transport calls ------------------------------------------------------------------------------------

    def post(
        self, rank: int, queue: Queue, ends: list[End], high_priority: bool = False, thread_blocks: int = 0
    ) -> StreamWork:
        """Post sends and receives as one operation. ``thread_blocks``: the number that it occupies; 0: that of the
        rules."""
        self.devices[rank].process.waits_for_context()
        with self.changed, simulating():
            device = self.devices[rank]
            if queue not in self._lanes:
                self._lanes[queue] = device.pooled_stream(high_priority)
            lane = self._lanes[queue]
            work = StreamWork(self, device, queue, ends, lane)
            work.thread_blocks = thread_blocks or self.rules.thread_blocks
            for end in ends:
                if self.run_ahead and not end.is_send and end.tensor.is_floating_point():
                    end.tensor.detach().fill_(math.nan)
                device.access(end.tensor, READ if end.is_send else WRITE, lane, _words(end))
                if self.record_streams:
                    device.record_stream(end.tensor, lane)
                self.keep_address(end)
            self.log.issued(rank)
            self._unfinished.append(work)
            self.enqueue(work)
            self.progress()
        self.after_post(rank)
        return work

    def transport(self, rank: int) -> StreamTransport:
        return StreamTransport(self, rank)

    def wait(self, work: Any, timeout: timedelta | None) -> None:
        device = work.device
        if not self.run_ahead:
            self.block(device.rank, lambda: work.left == 0 or work.finished, work.what)
        if timeout is not None:  # in this case ProcessGroupNCCL polls on the host
            self.block(device.rank, lambda: work.finished, work.what)
            device.host.learn(work.end, work.event)
        with self.changed:
            device.stream.wait_for(work.end, {work}, work.event)

    def is_completed(self, work: StreamWork) -> bool:
        """Whether the device is done with ``work``. If the host cannot know it, the seed decides, because a device may
        be slow."""
        if not work.finished:
            if self._turns is not None:
                self._turns.give_way(work.rank)
            return False
        if not work.device.host.knows(work.end) and self.rng.random() >= self.haste:
            return False
        work.device.host.learn(work.end, work.event)
        return True

    def abort_communicator(self, name: str, rank: int) -> None:
        """ncclCommAbort on ``rank``. The streams continue without the bytes. Bytes in buffers are lost."""
        with self.changed:
            for (_, direction), ends in self._open.items():
                if direction[0] == rank and direction[2] == name:
                    lost = [end for end in ends if isinstance(end, Buffered)]
                    for end in lost:
                        ends.remove(end)
            for work in self._unfinished:
                work.finished = work.finished or work.queue == (name, rank)
            self.progress()

    def block(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """The host of ``rank`` waits until ``ready()``. Raises RuntimeError if that can never become true."""
        if ready():
            return
        if self._turns is not None:
            self._turns.wait_until(rank, ready)
        else:
            with self.changed:
                self.changed.wait_for(lambda: ready() or self.failure is not None)
        if not ready():
            raise RuntimeError(
                f"aborted: {self.failure}" if self.failure else f"the device of rank {rank} hangs at {what}"
            )

    def progress(self) -> None:
        with self.changed:
            moved = True
            while moved:
                moved = self._begin()
                ready = [work for work in self._unfinished if self._can_finish(work)]
                for work in ready:
                    work.finished = True
                    work.needs = set()
                self._unfinished = [work for work in self._unfinished if not work.finished]
                moved = moved or bool(ready)
            self.changed.notify_all()

    def launch(self, device: VirtualDevice, lane: Lane) -> None:
        """Called when an operation that is not a transfer was issued to ``lane``."""
        if self.rules.multiprocessors:
            kernel = Kernel(device, lane)
            self._unfinished.append(kernel)
            self.progress()
            if not kernel.finished:
                lane.pending.add(kernel)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """With limited room, begin the operations that can begin. Returns whether any has begun."""
        room = self.rules.multiprocessors
        if not room:
            return False
        begun = [begin([work for work in self._unfinished if work.device is one], room) for one in self.devices]
        return any(begun)

    def _can_finish(self, work: Any) -> bool:
        if work.left or self.held(work):
            return False
        if self.rules.multiprocessors and not all(one.has_begun for one in (work, *work.partners)):
            return False
        return all(need.finished for one in (work, *work.partners) for need in one.needs)

    def _activate(self, work: Any) -> None:
        join(work.end, self._done.get(work.queue, {}))
        if self._is_eager(work):
            self._buffer(work.ends[0])
        else:
            super()._activate(work)

    def _is_eager(self, work: StreamWork) -> bool:
        end = work.ends[0]
        if not self.rules.eager_bytes or len(work.ends) > 1 or not end.is_send:
            return False
        is_small = self.windows[end].nbytes <= self.rules.eager_bytes
        waiting = sum(isinstance(one, Buffered) for one in self._open[True, end.direction])
        return is_small and waiting < SLOTS and (self._turns is None or self.rng.random() < 0.5)

    def _buffer(self, send: End) -> None:
        """End ``send`` by buffering its bytes, although its receive may not be posted yet."""
        with simulating():
            message = buffered(send, self.windows.pop(send))
            self.windows[message] = Window(message.tensor)
        receives = self._open[False, send.direction]
        if receives:
            self.meet(message, receives.popleft())
        else:
            self._open[True, send.direction].append(message)
        self.complete_end(send)

    def meet(self, send: End, receive: End) -> None:
        first: Any = send.work
        second: Any = receive.work
        is_buffered = isinstance(send, Buffered)
        join(second.end, first.end)
        second.partners.append(first)
        if not is_buffered:
            join(first.end, second.end)
            first.partners.append(second)
        size = self.windows[send].nbytes
        self.log.match(first.event, second.event, send.direction[:2], size, is_buffered)
        with simulating():
            self.deliver(send, receive)
        if not is_buffered:
            self.complete_end(send)
        self.complete_end(receive)

    def _complete(self, work: Any) -> None:
        self._done[work.queue] = work.end
        join(self._lanes[work.queue].clock, work.end)
        super()._complete(work)


class StreamTransport(MemoryTransport):
    """One rank's side of a StreamNetwork. The engine sees NCCL on a CUDA device."""

    network: StreamNetwork
    pollable = True
    blocks_host = False
    backend = "nccl"

    def __init__(self, network: StreamNetwork, rank: int) -> None:
        super().__init__(network, rank)
        self.device = network.devices[rank].place


def _words(end: End) -> str:
    source, target, channel = end.direction
    return f"send to rank {target} ({channel})" if end.is_send else f"receive from rank {source} ({channel})"
