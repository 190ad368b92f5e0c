"""Wait handles over a real gloo group: waiting twice, waiting once the group is gone, and what is refused before
anything is posted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_pp.comm.transport import ACT
from megatron_pp.errors import P2PError
from megatron_pp.p2p_communication import P2PCommunicator
from tests.harness.processes import run_processes

SHAPE = (6, 1, 4)


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(P2PError) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


def rank_main(rank: int, size: int) -> dict[str, object]:
    mine = P2PCommunicator(dist.group.WORLD, SimpleNamespace(pipeline_dtype=torch.float32, p2p_timeout=30.0))
    seen: dict[str, object] = {}
    _wait_twice(rank, mine, seen)
    _send_not_contiguous(rank, mine, seen)
    _refuse_wrong_tensors(mine, seen)
    dist.barrier()
    handle = mine.post_recv(SHAPE, 1 - rank, ACT)
    dist.destroy_process_group()
    seen["after the group"] = refusal(handle.wait)
    seen["after the group, again"] = refusal(handle.wait)
    return seen


def _wait_twice(rank: int, mine: P2PCommunicator, seen: dict[str, object]) -> None:
    """On gloo a second wait on a finished send would hang."""
    handle = mine.post_send(torch.ones(SHAPE), 1, ACT) if rank == 0 else mine.post_recv(SHAPE, 0, ACT)
    for _ in range(3):
        handle.wait()
    seen["completed"] = handle.is_completed()
    seen["pending"] = len(mine.pending)


def _send_not_contiguous(rank: int, mine: P2PCommunicator, seen: dict[str, object]) -> None:
    wide = torch.arange(48.0).reshape(4, 2, 6)
    strided = wide.permute(2, 1, 0)[:, 1:, :]
    assert not strided.is_contiguous()
    if rank == 0:
        mine.post_send(strided, 1, ACT).wait()
        return
    handle = mine.post_recv(SHAPE, 0, ACT)
    handle.wait()
    seen["strided"] = torch.equal(handle.tensor, strided)  # type: ignore[arg-type]


def _refuse_wrong_tensors(mine: P2PCommunicator, seen: dict[str, object]) -> None:
    """Nobody posts a receive: were anything posted, what follows would receive it."""
    for name, value in {
        "dtype": torch.ones(SHAPE, dtype=torch.float64),
        "device": torch.ones(SHAPE, device="meta"),
        "type": "text",
        "second of two": [torch.ones(SHAPE), torch.ones(SHAPE, dtype=torch.int32)],
    }.items():
        seen[name] = refusal(partial(mine.post_send, value, 1 - mine.rank, ACT))
    seen["pending after refusals"] = len(mine.pending)


def test_handles_on_gloo() -> None:
    first, second = run_processes(rank_main, 2, timeout=60.0, start_method="forkserver")
    assert second["strided"] is True
    for seen in (first, second):
        assert seen["completed"] is True
        assert seen["pending"] == 0
        assert seen["pending after refusals"] == 0
        for name in ("dtype", "device", "type", "second of two"):
            assert seen[name].startswith("P2PTypeError"), seen[name]
        assert "torch.float64" in seen["dtype"]
        assert "meta" in seen["device"]
        assert seen["after the group"].startswith("CommunicatorClosedError: pipeline rank")
        assert seen["after the group, again"] == seen["after the group"]
