"""The engine under further rules of the device; and what only such a rule catches."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pp.comm import nccl_transport
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_QUEUE, PlanSpec
from megatron_pp.runtime.executor import PlanExecutor
from megatron_pp.testing.streams import DeviceRules, StreamNetwork, virtual_cuda
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyData
from tests.harness.device_mutants import PostsFirstGradientAtOnce, PostsReceivesTwoAhead
from tests.harness.nccl_runs import step_on_nccl
from tests.harness.stream_runs import plan_on_streams
from tests.unit_tests.testing.test_streams_mutants import SPECS

HANGS = "the device of rank . hangs at"
V = PlanSpec("dualpipe_v", 2, 2, 8)
each_plan = pytest.mark.parametrize("spec", [*SPECS.values(), V], ids=[*SPECS, "v"])


def runs(spec: PlanSpec, rules: DeviceRules, executor: type[PlanExecutor] = PlanExecutor, seed: int = 0) -> None:
    report = plan_on_streams(spec, executor, rules=rules, seed=seed)
    assert not report.races, str(report)


def under_device_sync(spec: PlanSpec) -> PlanSpec:
    return replace(spec, device=(ONE_QUEUE, DEVICE_SYNC))


# -- hardware queues -----------------------------------------------------------------------------------------------


@each_plan
def test_streams_may_share_any_number_of_hardware_queues(spec: PlanSpec) -> None:
    for count, seed in ((1, 0), (2, 2)):
        runs(spec, DeviceRules(hardware_queues=count), seed=seed)


@pytest.mark.slow
@each_plan
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_streams_may_share_any_number_of_hardware_queues_in_any_way(spec: PlanSpec, seed: int) -> None:
    for count in (2, 3, 8, 31):
        runs(spec, DeviceRules(hardware_queues=count), seed=seed)


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (2, 1), (2, 2)])
def test_a_receive_posted_two_ahead_hangs_in_a_shared_queue_alone(count: int, seed: int) -> None:
    spec = SPECS["interleaved"]
    runs(spec, DeviceRules(), PostsReceivesTwoAhead, seed)
    runs(spec, DeviceRules(hardware_queues=32), PostsReceivesTwoAhead)
    with pytest.raises(RuntimeError, match=HANGS):
        runs(spec, DeviceRules(hardware_queues=count), PostsReceivesTwoAhead, seed)


# -- room for kernels ----------------------------------------------------------------------------------------------


@each_plan
def test_the_engine_needs_room_for_two_transfers(spec: PlanSpec) -> None:
    """And for a shape, which is a transfer of the device here, where shapes vary."""
    runs(spec, DeviceRules(multiprocessors=24 if spec.variable_shapes else 16))


def test_it_hangs_where_there_is_room_for_one() -> None:
    with pytest.raises(RuntimeError, match=HANGS):
        runs(SPECS["1f1b"], DeviceRules(multiprocessors=15))


L4 = DeviceRules(multiprocessors=58)


def step_on_channels(rules: DeviceRules) -> None:
    fields: dict[str, Any] = {"overlap_p2p_comm": True, "p2p_timeout": 600.0}
    report, _ = step_on_nccl(3, 1, ToyData(6), rules=rules, timeout=4.0, **fields)
    assert not report.races, report


def test_channels_take_few_thread_blocks() -> None:
    step_on_channels(L4)


@pytest.mark.slow
def test_channels_with_as_many_thread_blocks_as_nccl_takes_fill_a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "MAX_CTAS", 32)
    step_on_channels(DeviceRules())
    with pytest.raises(TimeoutError):
        step_on_channels(L4)


# -- allocations ---------------------------------------------------------------------------------------------------

WAITS = DeviceRules(allocation_waits=True)


OFFLOADED = replace(SPECS["interleaved"], offload_chunks=2)
LOOKS_AHEAD = [SPECS["1f1b"], SPECS["interleaved"], OFFLOADED]


@pytest.mark.parametrize("spec", [*LOOKS_AHEAD, SPECS["batched"], SPECS["plain"]])
def test_allocations_may_wait_for_the_device_where_compute_may(spec: PlanSpec) -> None:
    """Plans under ``device_sync`` post no receive ahead; others do, and one of the first step's allocations hangs."""
    runs(under_device_sync(spec), WAITS)
    if spec in LOOKS_AHEAD:
        with pytest.raises(RuntimeError, match=HANGS):
            runs(spec, WAITS)


@pytest.mark.parametrize("pin", [True, False])
def test_an_allocation_of_pinned_memory_waits_for_the_device(pin: bool) -> None:
    """For a receive whose send comes after what follows the allocation."""
    network = StreamNetwork(2, rules=WAITS)

    def run(rank: int) -> None:
        with network.running(rank):
            there, back = torch.empty(4), torch.empty(4)
            transport = network.transport(rank)
            if rank == 0:
                transport.irecv(back, 1, "G")
                torch.empty(4, device="cpu", pin_memory=pin)
                transport.isend(there, 1, "A")
            else:
                transport.irecv(there, 0, "A").wait()
                transport.isend(back, 0, "G")

    with virtual_cuda(), nullcontext() if not pin else pytest.raises(RuntimeError, match=HANGS):
        run_ranks(2, run, network.abort)


def test_a_receive_posted_before_compute_hangs_at_an_allocation_alone() -> None:
    spec = under_device_sync(SPECS["1f1b"])
    runs(spec, DeviceRules(), PostsFirstGradientAtOnce)
    with pytest.raises(RuntimeError, match=HANGS):
        runs(spec, WAITS, PostsFirstGradientAtOnce)
