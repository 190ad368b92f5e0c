"""What keeps an update from containing what an abort has made of a step, piece by piece: the lease between a failure
and its aborts, and the look before an update. ``test_replicas_after_an_abort.py`` has all of it together."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_pp.errors import PipelinePeerError, PipelineStallError
from megatron_pp.faults.guard import FaultGuard
from megatron_pp.faults.position.device_events import CompletedWork
from megatron_pp.faults.store.failures import EXCEPTION, Failure
from megatron_pp.faults.store.fault_store import FaultStore
from tests.unit_tests.faults.guards import raised_by


class Device(CompletedWork):
    """One that is done at once."""

    def mark(self, place: Any) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def guard(guard_of: Any) -> Any:
    """The guard of rank 0 of 2, which has run a step. ``guard.aborts``: the times of its aborts."""
    aborts: list[float] = []
    more = {"abort": lambda: aborts.append(time.monotonic()), "completed": Device()}
    guard, source = guard_of(0, dist.HashStore(), timeout=600.0, **more)
    guard.aborts = aborts
    with guard.step(source):
        pass
    return guard


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
    assert guard.aborts[0] - begun > guard.heartbeat.pace.lease


def test_an_update_waits_for_a_look_at_the_store_that_is_not_older_than_a_lease(guard: Any) -> None:
    """Nothing has been read since the step ended, which is a while ago."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.step()
    assert parameter.item() == 0.0
    guard.heartbeat.peers.checked_at -= guard.heartbeat.pace.lease
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
    guard.heartbeat.peers.checked_at -= guard.heartbeat.pace.lease
    monkeypatch.setattr(guard.heartbeat.store, "read_failure", fails)
    with pytest.raises(PipelineStallError, match="the store has failed"):
        optimizer.step()


def test_optimizers_of_other_threads_are_not_checked(guard: Any) -> None:
    publish(guard)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert raised_by(1, lambda rank: optimizer.step()) == [None]


def test_guards_come_and_go_while_an_optimizer_of_another_thread_steps(guard: Any, guard_of: Any) -> None:
    def pass_by() -> None:
        guard.close()
        other, _ = guard_of(0, dist.HashStore(), pipeline="another", completed=Device())
        other.close()

    def meanwhile(*step: object) -> None:
        thread = threading.Thread(target=pass_by)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    hooks = [register_optimizer_step_pre_hook(hook) for hook in (meanwhile, lambda *step: None)]
    try:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    finally:
        for hook in hooks:
            hook.remove()
    guard.close()
