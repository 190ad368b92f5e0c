"""A device whose memory is short: an allocation that gives cached blocks back waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pp.errors import PipelineError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import ON_NCCL, PlanSpec
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.threads import run_ranks
from testkit.device_runs.stream_runs import on_one_device
from testkit.mutants.device_mutants import PostsGradientsHalfway
from testkit.streams import LATER_STEPS, DeviceRules, StreamNetwork, StreamReport, virtual_cuda
from testkit.thread_runs.race_support import ExactBlock, exact_data, run_plan

KIB = 1024
HANGS = "the device of rank . hangs at"
EVENTS, CUDA_FREE = "the events of blocks that record_stream marked", "cudaFree of cached blocks"


class Network(StreamNetwork):
    """Notes what its hosts ask their devices to be over, and for which of these they wait."""

    asked: list[str]
    waits: list[str]

    def block(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        self.asked.append(what)
        if not ready():
            self.waits.append(what)
        super().block(rank, ready, what)


def network_with(memory: int, **more: Any) -> Network:
    """``memory``: in KiB."""
    network = Network(2, rules=replace(LATER_STEPS, memory=memory * KIB), **more)
    network.asked, network.waits = [], []
    return network


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def between_a_receive_and_its_cause(program: Callable[[Any], object], network: Network) -> None:
    """Rank 0 posts a receive, runs ``program(transport)``, and posts the send that the message depends on. Each of the
    two messages takes half a KiB."""

    def run(rank: int) -> None:
        with network.running(rank):
            there, back = torch.empty(4), torch.empty(4)
            transport = network.transport(rank)
            if rank == 0:
                transport.irecv(back, 1, "G")
                program(transport)
                transport.isend(there, 1, "A")
            else:
                transport.irecv(there, 0, "A").wait()
                transport.isend(back, 0, "G")
                transport.irecv(kib(2), 0, "late").wait()

    with virtual_cuda():
        run_ranks(2, run, network.abort)


def sends_and_drops(transport: Any) -> None:
    """What ``record_stream`` marks where torch does: 2 KiB that are sent, and dropped before they are received."""
    transport.isend(kib(2), 1, "late")


def drops_4_of_6(transport: Any) -> None:
    sends_and_drops(transport)
    kib(4)
    kib(6)


def asks_for_2_more(transport: Any) -> None:
    sends_and_drops(transport)
    kib(2)


@pytest.mark.parametrize("memory", [0, 20])
@pytest.mark.parametrize("record_streams", [False, True])
@pytest.mark.parametrize("program", [drops_4_of_6, asks_for_2_more])
def test_no_allocation_waits_while_memory_is_left(
    program: Callable[[Any], object], record_streams: bool, memory: int
) -> None:
    between_a_receive_and_its_cause(program, network_with(memory, record_streams=record_streams))


def test_memory_that_is_given_back_waits_for_an_idle_device() -> None:
    network = network_with(11)
    with pytest.raises(RuntimeError, match=HANGS):
        between_a_receive_and_its_cause(drops_4_of_6, network)
    assert CUDA_FREE in network.waits
    assert EVENTS not in network.waits


def test_blocks_that_record_stream_marked_are_waited_for() -> None:
    """Without the mark the block is cached, and serves the allocation at once: a race where its send is under way."""
    between_a_receive_and_its_cause(asks_for_2_more, network_with(4))
    network = network_with(4, record_streams=True)
    with pytest.raises(RuntimeError, match=HANGS):
        between_a_receive_and_its_cause(asks_for_2_more, network)
    assert EVENTS in network.waits


def test_memory_that_is_in_use_is_not_given_back() -> None:
    def program() -> None:
        kept = [kib(4), kib(4)]
        with pytest.raises(torch.OutOfMemoryError, match="rank 0: 4096 bytes of 10240 are not free"):
            kib(4)
        kept.pop()
        kept.append(kib(6))

    on_one_device(program, rules=DeviceRules(memory=10 * KIB))


# -- steps -----------------------------------------------------------------------------------------------------------


class GrowingBlock(ExactBlock):
    """Each forward needs more for a while than those before it, as longer sequences do; nothing cached serves it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        kib(2 * self.calls)
        return super().forward(x)


def run(spec: PlanSpec, memory: int, executor: type[PlanExecutor] = PlanExecutor, **rules: Any) -> Network:
    """A step of ``spec``'s plan."""
    network = network_with(memory, record_streams=True)
    network.rules = replace(network.rules, **rules)
    with virtual_cuda():
        run_plan(build_plan(spec), exact_data(spec.num_microbatches), network, executor=executor, block=GrowingBlock)
    report = StreamReport.of(network, [])
    assert not report.races, str(report)
    return network


@pytest.mark.parametrize(("schedule", "memory"), [("1f1b", 60), ("interleaved_1f1b", 80), ("gis_h", 80), ("zb_v", 80)])
def test_steps_end_that_give_memory_back(schedule: str, memory: int) -> None:
    spec = PlanSpec(schedule, 2, 1 if schedule == "1f1b" else 2, 8, device=ON_NCCL)
    assert CUDA_FREE in run(spec, memory).asked


def test_receives_posted_halfway_hang_at_an_allocation_alone() -> None:
    """Every kernel is loaded by then."""
    spec = PlanSpec("1f1b", 2, 1, 8, device=ON_NCCL)
    run(spec, 0, PostsGradientsHalfway)
    run(spec, 0, PostsGradientsHalfway, first_launches=True)
    with pytest.raises((RuntimeError, PipelineError), match=HANGS):
        run(spec, 60, PostsGradientsHalfway)
