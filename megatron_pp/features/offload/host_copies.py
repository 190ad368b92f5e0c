"""Copies between a device and host memory that run while the device computes. On CUDA there is a stream for each
direction, and host memory is pinned. On the CPU there is a thread for each direction.

Copies of one direction run in the order in which they are posted. Host memory is pooled, because pinning takes long, in
buffers whose sizes are powers of two, to which torch rounds pinned ones anyway. The pool frees buffers beyond the most
that were ever in use at one time: otherwise steps of varying shapes would leave buffers of all sizes.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from megatron_pp.comm.events import EventPool

Wait = Callable[[], None]  # called once: waits for a copy that was posted, or makes the current stream wait for it
Copy = tuple[Tensor, Tensor]  # target and source, which are flat and have one size


class HostCopies(ABC):
    """Posts copies of one rank, whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # number of bytes -> host buffers
        self.held = 0  # bytes of all buffers
        self._used = 0  # bytes in use now
        self._most = 0  # the most bytes that were in use at one time

    def buffer(self, nbytes: int) -> Tensor:
        """A buffer in host memory, [nbytes] of uint8."""
        size = 1 << max(0, nbytes - 1).bit_length()
        self._used += size
        self._most = max(self._most, self._used)
        if self._free[size]:
            return self._free[size].pop()[:nbytes]
        self.held += size
        for other, free in self._free.items():
            while free and self.held > self._most:
                free.pop()
                self.held -= other
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")[:nbytes]

    def give_back(self, buffer: Tensor) -> None:
        """Return ``buffer`` to the pool, once the copies from and to it were waited for."""
        whole = buffer.as_strided((buffer.untyped_storage().nbytes(),), (1,), 0)
        self._used -= whole.numel()
        self._free[whole.numel()].append(whole)

    @abstractmethod
    def post(self, copies: Sequence[Copy], to_host: bool) -> Wait:
        """Begin ``copies``, which read what was computed before on the current stream."""


def host_copies(device: torch.device) -> HostCopies:
    """The copies for tensors on ``device``."""
    return _StreamCopies(device) if device.type == "cuda" else _ThreadCopies(device)


class _ThreadCopies(HostCopies):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._threads = [ThreadPoolExecutor(1, "megatron_pp host copies") for _ in range(2)]

    def post(self, copies: Sequence[Copy], to_host: bool) -> Wait:
        done = self._threads[to_host].submit(_copy_all, list(copies))
        return lambda: done.result()


def _copy_all(copies: list[Copy]) -> None:
    """Run the copies and empty the list, because the thread holds its arguments for a while after the copies are
    over."""
    while copies:
        target, source = copies.pop()
        target.copy_(source)


class _StreamCopies(HostCopies):
    """Copies on CUDA streams. The compute stream waits for a copy to the host before the memory that the copy reads is
    freed. The memory that a copy back writes is allocated on the compute stream before the copy begins. So the
    allocator's order is kept without ``record_stream``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        self._events = EventPool()

    def post(self, copies: Sequence[Copy], to_host: bool) -> Wait:
        stream = self._streams[to_host]
        self._events.order(torch.cuda.current_stream(), stream)
        with torch.cuda.stream(stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return partial(self._wait, self._events.record(stream))

    def _wait(self, done: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(done)
        self._events.give_back(done)
