"""Data-parallel replicas and their collectives beside the pipeline, on virtual devices: wherever a rank fails, no
update of any replica is made from what an abort has ended without data, and all replicas raise in bounded time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_pp.errors import CommunicatorClosedError, PipelinePeerError
from megatron_pp.faults import failing
from megatron_pp.faults.attach import close_guard
from megatron_pp.faults.heartbeat import Pace
from testkit.device_runs.replicas import (
    BEFORE_THE_OPTIMIZER,
    GATHER,
    PHASES,
    REDUCTION,
    REPLICAS,
    STEADY,
    Fault,
    InjectedError,
    Job,
    Replica,
)
from testkit.mutants.guard_mutants import BEFORE_UPDATES
from testkit.streams import virtual_cuda
from testkit.sweeps import EXHAUSTIVE
from testkit.virtual_groups import virtual_distributed

LEASE = 0.3  # seconds, for 1.0; other times of the guard in proportion
BLIND = 3 * LEASE
SECONDS = 10.0  # for all to raise, on a loaded machine


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, nccl_settings: None) -> Iterator[None]:
    monkeypatch.setattr(Pace, "of", lambda timeout, world_size: Pace(0.06, 0.12, 0.3, LEASE))
    monkeypatch.setattr(failing, "_BEFORE_ESCALATION", 2 * LEASE)
    with virtual_cuda(), virtual_distributed():
        yield


def check(size: int, chunks: int, distributed: bool, fault: Fault) -> None:
    job = Job(size, chunks, distributed, fault)
    assert job.run().tainted_updates() == [], f"{fault}: (rank, step) of updates made from what was not delivered"
    ranks = range(size * REPLICAS)
    expected = {rank: InjectedError if rank == fault.rank else PipelinePeerError for rank in ranks}
    assert {rank: type(error) for rank, error in job.raised.items()} == expected, fault
    assert max(job.seconds.values()) < SECONDS, fault
    assert all(fault.phase in str(error) for error in job.raised.values())


def test_a_rank_fails_in_the_steady_state() -> None:
    check(2, 1, False, Fault(1, STEADY, True, BLIND))


def test_a_program_that_reduces_after_the_step_has_no_update_and_makes_its_groups_anew() -> None:
    """Rank 0 is past the step and reduces with rank 2, whose own pipeline is in order."""

    def after(one: Replica) -> None:
        assert all(map(torch.equal, one.before, one.values()))
        with pytest.raises(CommunicatorClosedError):
            one.optimizer.step()
        close_guard(one.communicator)
        one.optimizer.step()

    job = Job(2, 1, False, Fault(1, STEADY, False, BLIND), outside=True, after=after)
    job.run()
    assert [type(job.raised[rank]) for rank in range(4)] == [PipelinePeerError, InjectedError, *[PipelinePeerError] * 2]


# The optimizer waits for the device, so whoever is past it is not stuck.
STUCK = [(phase, phase != GATHER) for phase in PHASES] + [(REDUCTION, False), (BEFORE_THE_OPTIMIZER, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "stuck"), STUCK)
def test_two_replicas_of_two_ranks(phase: str, stuck: bool) -> None:
    faults = [Fault(rank, phase, stuck, BLIND) for rank in range(2 * REPLICAS)]
    with ThreadPoolExecutor(len(faults)) as jobs:  # they wait for most of their time
        list(jobs.map(lambda fault: check(2, 1, phase == GATHER, fault), faults))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_reductions_beside_an_interleaved_pipeline(phase: str) -> None:
    """Another rank of either replica in each phase; ``MEGATRON_PP_EXHAUSTIVE=1``: each rank."""
    for rank in range(4 * REPLICAS) if EXHAUSTIVE else [5 * PHASES.index(phase) % (4 * REPLICAS)]:
        check(4, 2, True, Fault(rank, phase, phase != GATHER, BLIND))


@pytest.mark.slow
@pytest.mark.parametrize("name", BEFORE_UPDATES)
def test_a_guard_that_lets_an_update_through_after_an_abort_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this rule alone: every rank that is past the update has finished its step in order."""
    for (kind, method), wrong in BEFORE_UPDATES[name].items():
        monkeypatch.setattr(kind, method, wrong)
    fault = Fault(3, STEADY, stuck=True, blind=4.0, late=1.0)
    job = Job(2, 1, True, fault, steps=1)
    tainted = job.run().tainted_updates()
    assert tainted
    assert {step for _, step in tainted} == {2}
    assert not {rank for rank, _ in tainted} & set(job.raised)
