"""gloo does not wake who waits for a send to a connection that was just reset; such a wait can be ended all the same,
whatever the size of the message."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from megatron_pp.comm.gloo import LARGE_BYTES, InterruptedTransferError
from megatron_pp.comm.group_transport import group_transport
from megatron_pp.comm.transport import ACT
from tests.harness.processes import run_processes


def rank_main(rank: int, size: int) -> str:
    """A wait for a message that the other rank takes only after the wait has ended; how it ended."""
    transport = group_transport(dist.group.WORLD)
    message = torch.ones(3)
    assert [transport.unfinished_sends(2, size) for size in (0, 12, LARGE_BYTES - 1, LARGE_BYTES)] == [0, 16, 16, 0]
    ended = ""
    if rank == 0:
        work = transport.isend(message, 1, ACT)
        # As abort does, without closing connections: gloo is not to help.
        threading.Timer(0.3, lambda: transport._threads.interrupt("a test")).start()
        with pytest.raises(InterruptedTransferError) as error:
            work.wait()
        ended = str(error.value)
    dist.barrier()
    if rank == 1:
        transport.irecv(message, 0, ACT).wait()
    transport.close()
    return ended


def test_a_small_send() -> None:
    assert run_processes(rank_main, 2, timeout=60.0, start_method="forkserver") == ["a test", ""]
