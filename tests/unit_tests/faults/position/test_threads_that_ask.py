"""The guard's threads under CUDA's rules for threads (``testkit/streams/host_process.py``): none makes a context
on another device, and a query that blocks keeps nobody from finding out who died, and from aborting."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pp.comm import abort
from megatron_pp.errors import PipelineError, PipelineStallError
from megatron_pp.faults import failing, guard
from megatron_pp.faults.position import device_events
from megatron_pp.faults.store.records import Process
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.pipeline import placement_of, run_rank, toy_step
from megatron_pp.testing.toy import ToyBlock, ToyData, toy_chunks
from testkit.device_runs.nccl_runs import on_nccl
from testkit.inputs.plan_text import save_plan, small_plan, with_programs
from testkit.mutants.guard_mutants import InWatchdog, OnDeviceZero, ReportsMemory, WithInterpreterLock
from testkit.streams import DeviceRules, StreamNetwork
from tests.unit_tests.faults.position.test_hosts_that_run_ahead import SECONDS, SIZE, Job, Raised, eventually, kill
from tests.unit_tests.testkit.streams.test_first_launches import GIS_H

pytestmark = pytest.mark.usefixtures("nccl_settings")
MUTANTS = {"InWatchdog": ("CompletedWork", InWatchdog), "WithInterpreterLock": ("EventQueries", WithInterpreterLock)}

BLOCKED = 5.0  # seconds after which a guard counts as stuck


def step_with_guard(one_device: bool) -> StreamNetwork:
    job = Job(stops=(-1, -1, -1))
    job.network = StreamNetwork(SIZE, seed=None, run_ahead=True, rules=DeviceRules(one_device=one_device))

    def main(rank: int, communicator: P2PCommunicator) -> None:
        job.step(communicator, 1)
        assert eventually(lambda: communicator.transport.guard.completed.oldest is None)

    assert set(job.run(main).values()) == {None}
    return job.network


def test_no_thread_makes_a_context_on_another_device() -> None:
    network = step_with_guard(one_device=False)
    assert not any(device.process.contexts for device in network.devices)


def test_a_thread_that_asks_without_choosing_its_device_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_events, "EventQueries", OnDeviceZero)
    step_with_guard(one_device=True)  # only the index shows it
    with pytest.raises(RuntimeError, match=r"rank [12]: .* in thread 'megatron_pp events' makes a context on cuda:0"):
        step_with_guard(one_device=False)


def woken(gone: Process, queries_block: bool, seconds: float = SECONDS) -> set[int]:
    """Rank 1 dies in step 2, while the hosts of the others wait for their devices: which of these find that out within
    ``seconds`` of the hosts' end of the step."""
    job = Job(stops=(1, 2, 2))
    job.network = StreamNetwork(SIZE, seed=None, run_ahead=True, rules=DeviceRules(queries_block=queries_block))

    def main(rank: int, communicator: P2PCommunicator) -> None:
        guard = communicator.transport.guard
        if rank == 1:
            too_late.start()
            kill(guard, gone)
            return
        with guard.watch("the loss"):
            torch.cuda.synchronize()

    too_late = threading.Timer(seconds, job.network.abort, ("too late",))
    raised: dict[int, Any] = job.run(main, steps=2)
    too_late.cancel()
    return {rank for rank in (0, 2) if isinstance(raised[rank], PipelineStallError) and job.seconds[rank] < seconds}


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
    assert woken(gone, queries_block=True, seconds=BLOCKED) == set()


# -- a launch that waits under the context's lock ----------------------------------------------------------------------


def said_of_launches_that_hang(path: Path, caplog: pytest.LogCaptureFixture, rules: DeviceRules) -> tuple[str, str]:
    """Two ranks hang in their first step, the first of them in the first launch of a kernel, for 8 seconds. What they
    log until then, and the errors that they raise."""
    save_plan(with_programs(small_plan("gis_h", 2, 2, 4), *GIS_H), path)
    fields: dict[str, Any] = {"pipeline_schedule": str(path), "virtual_pipeline_model_parallel_size": 2}
    fields |= {"overlap_p2p_comm": True, "device_sync": False, "p2p_timeout": 1.0, "compute_timeout": 60.0}
    network, raised, said = StreamNetwork(2, seed=None, rules=rules), list[str](), list[str]()

    def body(communicator: P2PCommunicator) -> None:
        try:
            run_rank(communicator.rank, 2, 2, ToyData(4), communicator.config, communicator)
        except (RuntimeError, PipelineError) as error:
            raised.append(f"{type(error).__name__}: {error}")

    def give_up() -> None:
        said.append(caplog.text)
        network.abort("too late")

    too_late = threading.Timer(8.0, give_up)
    too_late.start()
    on_nccl(network, body, **fields)
    too_late.cancel()
    return "".join(said or [caplog.text]), "\n".join(raised)


NAMED = "operations wait for each other's messages: rank "


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort, "_NCCL_PATIENCE", 0.5)
    monkeypatch.setattr(failing, "_BEFORE_ESCALATION", 0.5)
    monkeypatch.setattr(failing, "_BEFORE_SHOWING_STACK", 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_launches_that_hang_under_the_lock_are_named_though_no_abort_gets_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No rank comes out of such a launch before its process is ended; the log says why."""
    said, raised = said_of_launches_that_hang(tmp_path / "gis_h.json", caplog, DeviceRules(one_device=True))
    assert NAMED in said
    assert re.search(r"pipeline rank \d has to leave its step \(.*but is still in forward of chunk 0", said)
    assert "aborted: too late" in raised


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_a_heartbeat_that_calls_cuda_prevents_naming_the_hung_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where calls of other threads go through, such a guard does its work."""
    monkeypatch.setattr(guard, "Heartbeat", ReportsMemory)
    path, rules = tmp_path / "gis_h.json", DeviceRules(one_device=True, queries_block=True, context_lock=False)
    _, raised = said_of_launches_that_hang(path, caplog, rules)
    assert raised.count(f"PipelineStallError: pipeline stalled: no rank has made progress for 1 s: {NAMED}") == 2
    caplog.clear()
    said, raised = said_of_launches_that_hang(path, caplog, DeviceRules(one_device=True))
    assert NAMED not in said + raised


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


class CapturingBlock(ToyBlock):
    """A block whose first forward captures a graph, while the guard queries work that was issued before."""

    captures = True
    mode = "global"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.captures:
            self.captures = False
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode=self.mode)
            torch.ones(1).add_(1)
            time.sleep(0.6)  # the guard asks every quarter of a second
            graph.capture_end()
            graph.replay()
        return super().forward(x)


def errors_of_capture(mode: str) -> Raised:
    job = Job(stops=(0, 1, 0))

    class Block(CapturingBlock):
        pass

    Block.mode = mode

    def main(rank: int, communicator: P2PCommunicator) -> None:
        job.step(communicator, 1)
        job.network.devices[rank].stream.wait_for({}, {job.kernel})
        with communicator.transport.guard.watch("what is not over"):
            torch.ones(1).add_(1)
        chunks = toy_chunks(placement_of(job.config, SIZE, 1), rank, job.config, Block)
        try:
            toy_step(chunks, ToyData(2 * SIZE), communicator)
        finally:
            job.release()

    return job.run(main)


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_the_guard_may_ask_while_a_layer_is_captured(mode: str) -> None:
    assert set(errors_of_capture(mode).values()) == {None}


def test_a_guard_that_is_not_relaxed_ends_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_events, "_RELAXED", 0)
    assert set(errors_of_capture("thread_local").values()) == {None}
    raised = [str(error) for error in errors_of_capture("global").values() if type(error) is RuntimeError]
    assert raised
    assert all("previous error during capture (cudaEventQuery in thread 'megatron_pp events')" in one for one in raised)


def test_a_whole_step_is_not_captured() -> None:
    job = Job(stops=(-1, -1, -1))

    def main(rank: int, communicator: P2PCommunicator) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            job.step(communicator, 1)
        finally:
            graph.capture_end()

    raised = job.run(main)
    assert all("step cannot be captured in a CUDA graph" in str(error) for error in raised.values()), raised
