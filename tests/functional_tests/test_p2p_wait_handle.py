"""Wait handles over a real gloo group: waiting twice, a wait that another thread ends, a wait after the group is
destroyed, and refusals before an operation is posted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_pp.comm.backends import group_transport
from megatron_pp.comm.gloo.waiting_threads import LARGE_BYTES, InterruptedTransferError
from megatron_pp.comm.transport import ACT
from megatron_pp.errors import P2PError
from megatron_pp.p2p_communication import P2PCommunicator
from testkit.processes import run_processes

SHAPE = (6, 1, 4)


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(P2PError) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


def rank_main(rank: int, size: int) -> dict[str, object]:
    _interrupt_a_small_send(rank)
    mine = P2PCommunicator(dist.group.WORLD, SimpleNamespace(pipeline_dtype=torch.float32, p2p_timeout=30.0))
    _wait_twice(rank, mine)
    _send_not_contiguous(rank, mine)
    seen = _refuse_wrong_tensors(mine)
    dist.barrier()
    handle = mine.post_recv(SHAPE, 1 - rank, ACT)
    dist.barrier()  # a group that the other rank has destroyed takes no receive
    dist.destroy_process_group()
    seen["group"] = refusal(handle.wait)
    assert refusal(handle.wait) == seen["group"]
    return seen


def _interrupt_a_small_send(rank: int) -> None:
    """gloo does not wake a thread that waits for a send to a connection that was just reset. Another thread can end
    such a wait all the same, whatever the size of the message. The other rank receives the message only after the wait
    has ended."""
    transport = group_transport(dist.group.WORLD)
    message = torch.ones(3)
    assert [transport.unfinished_sends(2, size) for size in (0, 12, LARGE_BYTES - 1, LARGE_BYTES)] == [0, 16, 16, 0]
    if rank == 0:
        work = transport.isend(message, 1, ACT)
        # As abort does, but without closing connections, so that gloo does not help.
        threading.Timer(0.3, lambda: transport._threads.interrupt("a test")).start()
        with pytest.raises(InterruptedTransferError, match=r"^a test$"):
            work.wait()
    dist.barrier()
    if rank == 1:
        transport.irecv(message, 0, ACT).wait()
    transport.close()


def _wait_twice(rank: int, mine: P2PCommunicator) -> None:
    """On gloo a second wait on a finished send would hang."""
    handle = mine.post_send(torch.ones(SHAPE), 1, ACT) if rank == 0 else mine.post_recv(SHAPE, 0, ACT)
    for _ in range(3):
        handle.wait()
    assert handle.is_completed()
    assert not mine.pending


def _send_not_contiguous(rank: int, mine: P2PCommunicator) -> None:
    wide = torch.arange(48.0).reshape(4, 2, 6)
    strided = wide.permute(2, 1, 0)[:, 1:, :]
    assert not strided.is_contiguous()
    if rank == 0:
        mine.post_send(strided, 1, ACT).wait()
        return
    handle = mine.post_recv(SHAPE, 0, ACT)
    handle.wait()
    assert torch.equal(handle.tensor, strided)  # type: ignore[arg-type]


def _refuse_wrong_tensors(mine: P2PCommunicator) -> dict[str, object]:
    """No rank posts a receive here: if a send were posted, the next receive would get it."""
    seen: dict[str, object] = {}
    for name, value in {
        "float64": torch.ones(SHAPE, dtype=torch.float64),
        "meta": torch.ones(SHAPE, device="meta"),
        "str": "text",
        "int32": [torch.ones(SHAPE), torch.ones(SHAPE, dtype=torch.int32)],
    }.items():
        seen[name] = refusal(partial(mine.post_send, value, 1 - mine.rank, ACT))
    assert not mine.pending
    return seen


def test_wait_handles_on_gloo_refuse_wrong_tensors() -> None:
    for seen in run_processes(rank_main, 2, timeout=60.0, start_method="forkserver"):
        assert seen.pop("group").startswith("CommunicatorClosedError: pipeline rank")
        for name, words in seen.items():
            assert words.startswith("P2PTypeError"), words
            assert name in words
