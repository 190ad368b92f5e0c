"""No rank applies an update that contains what an abort has made of a step: not the ranks of the pipeline, whose hosts
are past the step, nor those of other pipelines that reduce with them. On virtual devices, where what was not delivered
is NaN."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.comm import abort
from megatron_pp.errors import CommunicatorClosedError, PipelinePeerError, PipelineStallError
from megatron_pp.faults.attach import close_guard
from megatron_pp.faults.device_events import CompletedWork
from megatron_pp.faults.guard import FaultGuard
from megatron_pp.faults.records import EXCEPTION, Failure, FaultStore
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.streams import StreamNetwork, virtual_cuda
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, toy_chunks, toy_config
from tests.harness.virtual_groups import process_group, virtual_distributed
from tests.unit_tests.faults.guards import raised_by

PIPELINES, REPLICAS = ([0, 1], [2, 3]), ([0, 2], [1, 3])


class FailingBlock(ToyBlock):
    """Forward number ``fails``, counted from 0, raises."""

    fails = -1
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 == self.fails:
            raise ZeroDivisionError("on the host")
        return super().forward(x)


class Trained:
    """One rank of two pipelines of two ranks, which are replicas of each other: steps, reductions and updates."""

    def __init__(self, rank: int, config: Any) -> None:
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in (*PIPELINES, *REPLICAS)}
        (self.pipeline, self.replicas) = (group for ranks, group in groups.items() if rank in ranks)
        self.communicator = P2PCommunicator(self.pipeline, config)
        place = self.communicator.rank
        self.chunks = toy_chunks(placement_of(config, 2, 1), place, config, FailingBlock)
        self.parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def step(self) -> None:
        """As far as the host is concerned."""
        self.optimizer.zero_grad()
        toy_step(self.chunks, ToyData(4), self.communicator)
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.replicas.allreduce([parameter.grad])
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


@pytest.mark.slow
def test_no_parameter_changes_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails in step 2. Rank 0 is past the step and reduces with rank 2, whose own pipeline is in order; rank 3
    waits for what rank 1 never sends."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    network, store = StreamNetwork(4, seed=None, run_ahead=True), dist.HashStore()
    config = toy_config(overlap_p2p_comm=True, p2p_timeout=600.0)
    together = threading.Barrier(4)
    raised: dict[int, Exception] = {}
    ranks: dict[int, Trained] = {}
    monkeypatch.setattr(abort, "abort_all_groups", lambda: [one.replicas.abort() for one in ranks.values()])

    def rank_main(rank: int) -> None:
        with network.running(rank), process_group(network, rank, store):
            ranks[rank] = one = Trained(rank, config)
            network.run_ahead = False  # in the first step bytes are looked at
            together.wait(30.0)
            start = one.values()
            one.step()
            before = one.values()
            assert not any(map(torch.equal, start[:1], before[:1]))
            assert all(value.isfinite().all() for value in before)
            together.wait(30.0)
            network.run_ahead = True
            if rank == 1:
                one.chunks[0].inner.fails = 4 + 1
            try:
                one.step()
            except (ZeroDivisionError, PipelinePeerError) as error:
                raised[rank] = error
            together.wait(60.0)
            for was, now in zip(before, one.values(), strict=True):
                assert torch.equal(was, now), f"rank {rank} has applied an update of the step that was aborted"
            together.wait(60.0)
            with pytest.raises(CommunicatorClosedError):
                one.optimizer.step()
            close_guard(one.communicator)
            one.optimizer.step()
            one.communicator.transport.close()

    with virtual_cuda(), virtual_distributed():
        run_ranks(4, rank_main, network.abort)
    assert {rank: type(error) for rank, error in raised.items()} == {
        **dict.fromkeys(range(4), PipelinePeerError),
        1: ZeroDivisionError,
    }
    assert "on the host" in str(raised[2])


class Device(CompletedWork):
    """One that is done at once."""

    def mark(self, place: Any) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of rank 0 of 2, ``guard.aborted`` is when it aborted."""
    aborts: list[float] = []
    store = dist.HashStore()
    abort = partial(lambda: aborts.append(time.monotonic()))
    guard: Any = FaultGuard(store, "p", 0, 2, 600.0, abort, completed=Device())
    guard.aborts = aborts
    with guard.step(SimpleNamespace(plan=build_plan(PlanSpec("1f1b", 2, 1, 4)), position=0)):
        pass
    yield guard
    guard.close()


def _publish_and_wait(guard: Any) -> None:
    publish(guard)
    while not guard.aborts:
        time.sleep(0.01)


def publish(guard: FaultGuard) -> None:
    FaultStore(guard.store, "p", 1, 2, 1).publish_failure(Failure(EXCEPTION, "p", 1, 1, message="bad"))


def test_an_abort_comes_a_lease_after_what_the_others_have_to_read(guard: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(PipelinePeerError), guard.watch("the optimizer"):
        _publish_and_wait(guard)
    assert guard.aborts[0] - begun > guard._heartbeat.pace.lease


def test_an_update_waits_for_a_look_at_the_store_that_is_not_older_than_a_lease(guard: Any) -> None:
    """Nothing has been read since the step ended, which is a while ago."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.step()
    assert parameter.item() == 0.0
    guard._heartbeat.peers.checked_at -= guard._heartbeat.pace.lease
    publish(guard)
    with pytest.raises(PipelinePeerError, match="bad"):
        optimizer.step()
    assert parameter.item() == 0.0


@pytest.mark.slow
def test_an_update_without_the_store_is_refused(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then what other ranks have published."""

    def fails() -> None:
        raise dist.DistNetworkError("connection reset")

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.step()
    guard._heartbeat.peers.checked_at -= guard._heartbeat.pace.lease
    monkeypatch.setattr(guard._heartbeat.store, "read_failure", fails)
    with pytest.raises(PipelineStallError, match="the store has failed"):
        optimizer.step()


def test_optimizers_of_other_threads_are_not_its_own(guard: Any) -> None:
    publish(guard)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert raised_by(1, lambda rank: optimizer.step()) == [None]
