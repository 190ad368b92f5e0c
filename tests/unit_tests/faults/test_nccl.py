"""What can be said about NCCL without a GPU: aborts that wait for each other, and what torch is set to leave alone."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pp.comm import abort
from megatron_pp.comm.backends import group_transport
from megatron_pp.faults.attach import close_guard, watched
from megatron_pp.faults.nccl_settings import SETTINGS, leave_failures_to_the_guard, warning
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.memory_transport import MemoryNetwork, MemoryTransport
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import toy_config
from testkit.streams import StreamNetwork, virtual_cuda
from testkit.virtual_groups import process_group, virtual_distributed


class Communicator:
    """Stands for an NCCL process group whose abort returns when all others are being aborted too."""

    def __init__(self, together: threading.Barrier, kind: str = "nccl") -> None:
        self.together = together
        self.kind = kind
        self.aborted = False

    def _get_backend(self, device: Any) -> Any:
        if device.type != "cuda":
            raise RuntimeError("no backend for this device")
        return self

    def name(self) -> str:
        return self.kind

    def abort(self) -> None:
        self.together.wait(30.0)
        self.aborted = True


def test_communicators_whose_aborts_wait_for_each_other() -> None:
    """Of any backend that torch has on NCCL."""
    together = threading.Barrier(3)
    groups: Any = [Communicator(together, kind) for kind in ("nccl", "nccl2", "nccl-lazy")]
    abort.abort_groups(groups)
    assert [group.aborted for group in groups] == [True, True, True]


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has one backend on NCCL")
def test_backends_of_torch_on_nccl_can_be_aborted() -> None:
    assert all(hasattr(one, "abort") for one in (dist.ProcessGroupNCCL2, dist.ProcessGroupNCCLLazy))


def test_an_abort_that_does_not_return_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(abort, "_NCCL_PATIENCE", 0.2)
    together = threading.Barrier(2)
    group: Any = Communicator(together)
    before = set(threading.enumerate())
    abort.abort_groups([group])
    (left,) = set(threading.enumerate()) - before
    assert "aborting 1 NCCL communicator(s) takes longer" in caplog.text
    together.abort()
    left.join(30.0)
    assert "aborting an NCCL communicator: " in caplog.text, "said here, not in the next test"


def test_user_settings_of_nccl_variables_are_kept() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    leave_failures_to_the_guard(environ)
    assert environ == {**SETTINGS, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_a_warning_where_torch_would_end_the_process() -> None:
    for environ in ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}):
        said = warning(environ)
        assert said is not None
        assert all(f"{name}={value}" in said for name, value in SETTINGS.items())
    assert warning(dict(SETTINGS)) is None


class Limited(MemoryTransport):
    """The backend of a process group with a timeout of a minute."""

    @property
    def limit(self) -> timedelta:
        return timedelta(seconds=60)


def test_a_group_that_gives_up_before_the_guard_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()

    def warnings(compute_timeout: float | None, rank: int = 0, p2p_timeout: float | None = 5.0) -> list[str]:
        caplog.clear()
        config = toy_config(compute_timeout=compute_timeout, p2p_timeout=p2p_timeout)
        transport = Limited(MemoryNetwork(2, store=store), rank)
        communicator = P2PCommunicator(ThreadGroup(rank, 2), config, transport)
        for _ in range(2):
            with watched(communicator, config, "the step"):
                pass
        close_guard(communicator)
        return [record.getMessage() for record in caplog.records]

    (said,) = warnings(61.0)
    assert "of pipeline threads gives up after 60 s, but config.compute_timeout is 61 s" in said
    assert "--distributed-timeout-minutes" in said
    assert warnings(61.0, rank=1) == []
    assert warnings(60.0) == []
    assert warnings(None, p2p_timeout=60.0) == [], "nobody asked for ten times as long"
    assert warnings(None, p2p_timeout=None) == [], "the default is below the group's"
    (said,) = warnings(None, p2p_timeout=61.0)
    assert "gives up after 60 s, but config.p2p_timeout is 61 s" in said


def test_a_groups_timeout_is_read_from_the_group() -> None:
    network, store = StreamNetwork(2, seed=None), dist.HashStore()
    with virtual_cuda(), virtual_distributed(), network.running(0), process_group(network, 0, store) as group:
        transport = group_transport(group)
        assert transport.limit == timedelta(minutes=10)
        assert not transport.blocks_host
