"""The guard's threads under CUDA's rules for threads (``testing/streams/host_process.py``): none makes a context on
another device, and a query that blocks keeps nobody from finding out who died, and from aborting."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from megatron_pp.errors import PipelineStallError
from megatron_pp.faults import device_events
from megatron_pp.faults.records import Process
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.streams import DeviceRules, StreamNetwork
from tests.harness.guard_mutants import InWatchdog, OnDeviceZero, WithInterpreterLock
from tests.unit_tests.faults.test_hosts_that_run_ahead import SECONDS, SIZE, Job, eventually, kill

pytestmark = pytest.mark.usefixtures("nccl_settings")
MUTANTS = {"InWatchdog": ("CompletedWork", InWatchdog), "WithInterpreterLock": ("EventQueries", WithInterpreterLock)}


def contexts(one_device: bool) -> list[str]:
    """Those that a step with its guard makes on devices of other ranks."""
    job = Job(stops=(-1, -1, -1))
    job.network = StreamNetwork(SIZE, seed=None, run_ahead=True, rules=DeviceRules(one_device=one_device))

    def main(rank: int, communicator: P2PCommunicator) -> None:
        job.step(communicator, 1)
        assert eventually(lambda: communicator.transport.guard.completed.oldest is None)

    assert set(job.run(main).values()) == {None}
    return [f"{device.rank}: {why}" for device in job.network.devices for why in device.process.contexts.values()]


def test_no_thread_makes_a_context_on_another_device() -> None:
    assert contexts(one_device=False) == []


def test_a_thread_that_asks_without_choosing_its_device_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_events, "EventQueries", OnDeviceZero)
    assert contexts(one_device=True) == [], "only the index shows it"
    found = contexts(one_device=False)
    assert [text[0] for text in found] == ["1", "2"]
    assert all("in thread 'megatron_pp events' makes a context on cuda:0" in text for text in found), found


def woken(gone: Process, queries_block: bool) -> set[int]:
    """Rank 1 dies in step 2, while the hosts of the others wait for their devices: which of these find that out."""
    job = Job(stops=(1, 2, 2))
    job.network = StreamNetwork(SIZE, seed=None, run_ahead=True, rules=DeviceRules(queries_block=queries_block))

    def main(rank: int, communicator: P2PCommunicator) -> None:
        guard = communicator.transport.guard
        if rank == 1:
            kill(guard, gone)
            return
        with guard.watch("the loss"):
            torch.cuda.synchronize()

    too_late = threading.Timer(SECONDS + 1.0, job.network.abort, ("too late",))
    too_late.start()
    raised: dict[int, Any] = job.run(main, steps=2)
    too_late.cancel()
    return {rank for rank in (0, 2) if isinstance(raised[rank], PipelineStallError) and job.seconds[rank] < SECONDS}


@pytest.mark.slow
def test_a_query_that_blocks_does_not_keep_the_guard_from_aborting(gone: Process) -> None:
    assert woken(gone, queries_block=True) == {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_guard_that_a_query_blocks_does_not_abort(
    mutant: str, gone: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_events, *MUTANTS[mutant])
    assert woken(gone, queries_block=False) == {0, 2}
    assert woken(gone, queries_block=True) == set()
