"""The engine under further rules of the device; and what only such a rule catches."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.comm.nccl import nccl_transport
from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.comm.transport import ACT
from megatron_pp.plan.ir.spec import ONE_QUEUE, PlanSpec
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyData, toy_config
from testkit.device_runs.nccl_runs import step_on_nccl
from testkit.device_runs.stream_runs import plan_on_streams
from testkit.judges.stream_judge import Judge
from testkit.mutants.device_mutants import (
    AbortsToClose,
    PostsReceivesTwoAhead,
    WaitsForTheLast,
    WarmsNothingUp,
)
from testkit.streams import LATER_STEPS, CallLog, DeviceRules, StreamNetwork, StreamReport, virtual_cuda
from testkit.virtual_groups import process_group, virtual_distributed
from tests.unit_tests.testkit.streams.test_streams_mutants import SPECS

HANGS = "the device of rank . hangs at"
V = PlanSpec("dualpipe_v", 2, 2, 8)
each_plan = pytest.mark.parametrize("spec", [*SPECS.values(), V], ids=[*SPECS, "v"])


def runs(spec: PlanSpec, rules: DeviceRules, executor: type[PlanExecutor] = PlanExecutor, seed: int = 0) -> None:
    report = plan_on_streams(spec, executor, rules=rules, seed=seed)
    assert not report.races, str(report)


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
    """And in a first step, where launches wait for it."""
    spec = replace(SPECS["interleaved"], device=(ONE_QUEUE,))
    runs(spec, LATER_STEPS, PostsReceivesTwoAhead, seed)
    runs(spec, replace(LATER_STEPS, hardware_queues=32), PostsReceivesTwoAhead)
    with pytest.raises(RuntimeError, match=HANGS):
        runs(spec, replace(LATER_STEPS, hardware_queues=count), PostsReceivesTwoAhead, seed)


# -- room for kernels ----------------------------------------------------------------------------------------------


@each_plan
def test_the_engine_needs_room_for_two_transfers(spec: PlanSpec) -> None:
    """And for a shape, which is a transfer of the device here, where shapes vary."""
    runs(spec, DeviceRules(multiprocessors=24 if spec.variable_shapes else 16))


def test_the_engine_hangs_with_room_for_one_transfer() -> None:
    with pytest.raises(RuntimeError, match=HANGS):
        runs(replace(SPECS["1f1b"], device=(ONE_QUEUE,)), replace(LATER_STEPS, multiprocessors=15))


L4 = replace(LATER_STEPS, multiprocessors=58)


def step_on_channels(rules: DeviceRules, timeout: float = 60.0) -> None:
    """Receives are posted ahead, whatever may wait for them."""
    fields: dict[str, Any] = {"overlap_p2p_comm": True, "device_sync": False, "p2p_timeout": 600.0}
    report, _ = step_on_nccl(3, 1, ToyData(6), rules=rules, timeout=timeout, **fields)
    assert not report.races, report


def test_channels_take_few_thread_blocks() -> None:
    step_on_channels(L4)


@pytest.mark.slow
def test_channels_with_as_many_thread_blocks_as_nccl_takes_fill_a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "MAX_CTAS", 32)
    step_on_channels(LATER_STEPS)
    with pytest.raises(TimeoutError):
        step_on_channels(L4, timeout=4.0)


# -- small sends -----------------------------------------------------------------------------------------------------

EAGER = DeviceRules(eager_bytes=1 << 20)


@each_plan
def test_small_sends_may_end_before_they_are_received(spec: PlanSpec) -> None:
    for seed in range(3):
        runs(spec, EAGER, seed=seed)


@pytest.mark.parametrize("rules", [DeviceRules(), EAGER])
def test_waiting_for_a_small_send_does_not_order_the_receiver(rules: DeviceRules) -> None:
    """Rank 1 posts the second receive after the first has arrived; rank 0 waits for the second send alone."""
    found = set()
    for seed in range(4):
        network = StreamNetwork(2, rules=rules, seed=seed, log=CallLog())

        def run(rank: int, network: StreamNetwork = network) -> None:
            with network.running(rank):
                first, second = torch.ones(4), torch.ones(4)
                transport = network.transport(rank)
                if rank == 0:
                    transport.isend(first, 1, "A")
                    transport.isend(second, 1, "G").wait()
                    first.add_(1)
                else:
                    transport.irecv(first, 0, "A").wait()
                    transport.irecv(second, 0, "G").wait()

        with virtual_cuda():
            report = StreamReport.of(network, run_ranks(2, run, network.abort))
        found |= {race.kind for race in report.races}
        assert bool(Judge().judge(network.log.records)) == bool(report.races), "the judge says so too"
    assert found == ({"read/write"} if rules is EAGER else set())


def evaluate_and_close(rules: DeviceRules, timeout: float = 60.0) -> None:
    """Rank 1 begins when rank 0 has closed its transport, or does not within a second."""
    network, store, closed = StreamNetwork(2, seed=None, rules=rules), dist.HashStore(), threading.Event()

    def rank_main(rank: int) -> None:
        config = toy_config(overlap_p2p_comm=True)
        with network.running(rank), process_group(network, rank, store) as group:
            communicator = P2PCommunicator(group, config)
            communicator.prepare([(0, 1)])
            if rank == 0:
                communicator.post_send(torch.ones(4), 1, ACT).wait()
                torch.cuda.synchronize()
            else:
                closed.wait(1.0)
                handle = communicator.post_recv((4,), 0, ACT, False)
                handle.wait()
                assert handle.tensor.tolist() == [1.0] * 4
            communicator.transport.close()
            closed.set()

    with virtual_cuda(), virtual_distributed():
        run_ranks(2, rank_main, network.abort, timeout)


@pytest.mark.slow
def test_closing_a_transport_loses_no_small_send(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate_and_close(EAGER)
    monkeypatch.setattr(nccl_transport, "NcclChannels", AbortsToClose)
    evaluate_and_close(DeviceRules())
    with pytest.raises(TimeoutError):
        evaluate_and_close(EAGER, timeout=4.0)


# -- communicators of pairs --------------------------------------------------------------------------------------------


def shared_step(device_id: bool) -> StreamReport:
    """What is not in a batch goes over the given group."""
    return step_on_nccl(3, 1, ToyData(6), device_id=device_id, p2p_channels="shared", p2p_timeout=600.0)[0]


@pytest.mark.parametrize("device_id", [False, True])
def test_a_pair_may_have_a_communicator_of_its_own(device_id: bool) -> None:
    report = shared_step(device_id)
    assert not report.races, report


def test_transfers_of_two_pairs_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "NcclTransport", WaitsForTheLast)
    assert not shared_step(device_id=True).races, "they are on one communicator (pytorch#154132)"
    assert "write/read" in {race.kind for race in shared_step(device_id=False).races}


@pytest.mark.parametrize("warm_up", [True, False])
def test_channels_exist_before_the_first_step(warm_up: bool) -> None:
    """A receive that is posted ahead would else keep the host waiting for the other end."""
    report, _ = step_on_nccl(2, 2, ToyData(4), overlap_p2p_comm=True, warm_up_p2p=warm_up)
    assert not report.races, report


@pytest.mark.slow
def test_channels_that_a_step_makes_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "NcclTransport", WarmsNothingUp)
    fields: dict[str, Any] = {"overlap_p2p_comm": True, "device_sync": False, "p2p_timeout": 600.0}
    with pytest.raises(TimeoutError):
        step_on_nccl(2, 2, ToyData(4), rules=LATER_STEPS, timeout=4.0, **fields)
    assert not dist.distributed_c10d._pg_names, "the next group of torch may not have these names"
