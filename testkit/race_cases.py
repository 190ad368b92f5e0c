"""The cases of the deallocation race (Megatron-LM#4047) on two real ranks: one sends and drops its tensor, the other
receives late.

Every case returns, on the receiver, the share of elements that differ from those posted.
"""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.runtime.engine.swapped_outputs import deallocate_output_tensor

BYTES = 64 * 2**20
LATE = 0.3  # least seconds between the post of the send and that of the receive
GOOD, BAD = 1.0, 2.0


class Rank:
    """One of the two ranks: its device, its communicator, and the value with which it overwrites freed memory."""

    def __init__(self, rank: int, device: torch.device, dtype: torch.dtype, num_bytes: int = BYTES) -> None:
        self.rank = rank
        self.device = device
        self.dtype = dtype
        self.shape = (num_bytes // dtype.itemsize // 256, 1, 256)
        config = SimpleNamespace(pipeline_dtype=dtype, batch_p2p_comm=False, p2p_timeout=60.0)
        self.communicator = P2PCommunicator(dist.group.WORLD, config)
        self.communicator.prepare([(0, 1)], num_bytes, num_bytes)  # the same channels as in a schedule
        self.overwritten: list[torch.Tensor] = []
        self._store = dist.distributed_c10d._get_default_store()
        self._turn = 0

    def connect(self) -> None:
        """Connect the ranks before a case. NCCL would connect two ranks at their first message, and make both wait."""
        token = torch.zeros(1, device=self.device)
        if self.rank == 0:
            dist.send(token, 1)
        else:
            dist.recv(token, 0)

    def tensor(self) -> torch.Tensor:
        return torch.full(self.shape, GOOD, dtype=self.dtype, device=self.device)

    def overwrite(self) -> None:
        """Overwrite freed memory, as the next microbatch does. The allocator gives the same addresses to a slightly
        smaller tensor. A tensor of the same size would not fit, because of its alignment.
        """
        shape = (self.shape[0] - 64, *self.shape[1:])
        self.overwritten = [torch.full(shape, BAD, dtype=self.dtype, device=self.device) for _ in range(2)]
        self.announce()

    def announce(self) -> None:
        """Tell the receiver that overwriting is done, so that it may post."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._store.set(self._signal, "done")

    @property
    def _signal(self) -> str:
        return f"race/{self.dtype}/{self._turn}"

    def together(self) -> None:
        """Wait until both ranks are here and their devices are idle."""
        self.overwritten = []
        self._turn += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def late(self, until_overwritten: bool = True) -> None:
        """Wait until the other rank has freed and overwritten its memory, however slow the machine is."""
        time.sleep(LATE)
        if until_overwritten:
            self._store.wait([self._signal])

    def send_forward(self, output: torch.Tensor) -> dict[str, Any]:
        """Post a send without waiting, as the interleaved schedule does."""
        _, handles = self.communicator.send_forward_recv_forward(
            output, recv_prev=False, tensor_shape=self.shape, overlap_p2p_comm=True
        )
        return handles

    def recv_plainly_late(self) -> torch.Tensor:
        """Receive late, by torch.distributed alone."""
        self.late()
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        dist.recv(buffer, 0)
        return buffer

    def recv_forward_late(self, until_overwritten: bool = True) -> torch.Tensor:
        self.late(until_overwritten)
        return self.communicator.recv_forward(self.shape, is_first_stage=False)

    def recv_backward_late(self) -> torch.Tensor:
        self.late()
        return self.communicator.recv_backward(self.shape, is_last_stage=False)


def plain_isend(me: Rank) -> None:
    """Only torch.distributed: isend, deallocate, allocate, overwrite. On NCCL torch calls ``record_stream`` for every
    point-to-point tensor, so that the stock allocator does not reuse its memory before the send is done."""
    output = me.tensor()
    work = dist.isend(output, 1)
    deallocate_output_tensor(output, True)
    me.overwrite()
    work.wait()


def deallocate_without_waiting(me: Rank) -> None:
    """Our send, whose handle owns the bytes, and a deallocation without a wait."""
    output = me.tensor()
    handles = me.send_forward(output)
    deallocate_output_tensor(output, True)
    me.overwrite()
    handles["send_next"].wait()
    handles["send_next"].wait()  # a no-op


def wait_then_deallocate(me: Rank) -> None:
    """A wait and then a deallocation, as in the schedules."""
    output = me.tensor()
    me.send_forward(output)["send_next"].wait()
    deallocate_output_tensor(output, True)
    me.overwrite()


def no_deallocation(me: Rank) -> None:
    """deallocate_pipeline_outputs=False."""
    output = me.tensor()
    handles = me.send_forward(output)
    deallocate_output_tensor(output, False)
    me.overwrite()
    handles["send_next"].wait()
    assert output.shape == me.shape


def handle_dropped(me: Rank) -> None:
    """The handle is dropped, and no call waits for the send."""
    me.send_forward(me.tensor())
    gc.collect()
    me.overwrite()


def gradient_dropped(me: Rank) -> None:
    """An input gradient is sent backward, and its last reference is dropped."""
    gradient = me.tensor()
    _, handles = me.communicator.send_backward_recv_backward(
        gradient, recv_next=False, tensor_shape=me.shape, overlap_p2p_comm=True
    )
    del gradient
    gc.collect()
    me.overwrite()
    handles["send_prev"].wait()


def write_after_send(me: Rank) -> None:
    """Only torch.distributed: isend, then a write into the sent tensor. Neither an allocator nor a reference protects
    from this."""
    output = me.tensor()
    work = dist.isend(output, 1)
    output.fill_(BAD)
    me.announce()
    work.wait()


class Case(NamedTuple):
    """One case: the work of the rank ``sender``, and that of the other rank."""

    send: Callable[[Rank], None]
    receive: Callable[[Rank], torch.Tensor] = Rank.recv_forward_late
    sender: int = 0


CASES = {
    "a": Case(plain_isend, Rank.recv_plainly_late),
    "b": Case(deallocate_without_waiting),
    "c": Case(wait_then_deallocate, partial(Rank.recv_forward_late, until_overwritten=False)),
    "d": Case(no_deallocation),
    "e": Case(handle_dropped),
    "f": Case(gradient_dropped, Rank.recv_backward_late, sender=1),
    "h": Case(write_after_send, Rank.recv_plainly_late),
}


def wrong_share(me: Rank, case: Case) -> float:
    """The share of wrong elements that this rank has received. The sender returns 0."""
    if me.rank == case.sender:
        case.send(me)
        return 0.0
    got = case.receive(me)
    return float((got != GOOD).sum().item()) / got.numel()


def run_cases(
    rank: int, size: int, dtypes: dict[str, int], devices: tuple[str, ...], num_bytes: int = BYTES
) -> dict[str, list[float]]:
    """Run all cases, each ``dtypes[name]`` times per dtype. Returns "case dtype" -> this rank's shares of wrong
    elements."""
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shares: dict[str, list[float]] = {}
    for name, times in dtypes.items():
        me = Rank(rank, device, getattr(torch, name), num_bytes)
        me.connect()
        for letter, case in CASES.items():
            for _ in range(times):
                me.together()
                shares.setdefault(f"{letter} {name}", []).append(wrong_share(me, case))
        me.together()
        for handle in list(me.communicator.pending):
            handle.wait()
    return shares


def build_reusing_allocator(folder: Path) -> Path:
    """The library of ``reusing_allocator.c``, built in ``folder`` by the C compiler."""
    library = folder / "reusing_allocator.so"
    runtime = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
    source = Path(__file__).with_name("reusing_allocator.c")
    flags = ["-shared", "-fPIC", f'-DCUDART="{runtime}"', str(source), "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run(["cc", *flags], check=True, capture_output=True, text=True)
    return library


def run_cases_on_one_gpu(
    rank: int, size: int, dtypes: dict[str, int], store: str, allocator: Path | None = None
) -> dict[str, list[float]]:
    """``run_cases`` with both ranks on one GPU. NCCL refuses that only within one host, so each rank claims its own
    host, and sockets connect them. ``allocator``: a library of ``build_reusing_allocator``, in place of torch's
    allocator.
    """
    os.environ["NCCL_HOSTID"] = f"megatron-pp-race-{rank}"
    if allocator is not None:
        pluggable = torch.cuda.memory.CUDAPluggableAllocator(str(allocator), "reusing_malloc", "reusing_free")
        torch.cuda.memory.change_current_allocator(pluggable)
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        return run_cases(rank, size, dtypes, ("cuda:0",) * size)
    finally:
        dist.destroy_process_group()


# glibc reads these when a process starts: freed memory goes to the next allocation of its size, not back to the
# system. Then a bare isend sends the next microbatch's data. Otherwise it might read unmapped memory, and crash.
KEEP_FREED_MEMORY_MAPPED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}

ONE_GPU_ENVIRONMENT = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}
