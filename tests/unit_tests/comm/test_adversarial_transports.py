"""The hostile networks themselves: they catch what they are made for, keep to the rules, and repeat by seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.transport import ACT, GRAD
from megatron_pp.errors import P2PError
from megatron_pp.testing.adversarial_transports import (
    HOSTILE_NETWORKS,
    HostileNetwork,
    LastMomentNetwork,
    PoisoningNetwork,
    ShuffledNetwork,
)
from megatron_pp.testing.memory_transport import MemoryTransport
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import toy_config

FAST_AND_SLOW = pytest.mark.parametrize("seed", range(4))


def run_pair(network: HostileNetwork, *mains: Callable[[MemoryTransport], object]) -> list[object]:
    """Each function runs as one rank and is given its transport."""

    def rank_main(rank: int) -> object:
        with network.running(rank):
            return mains[rank](network.transport(rank))

    return run_ranks(len(mains), rank_main, network.abort, 20.0)


def receive(transport: MemoryTransport) -> torch.Tensor:
    buffer = torch.zeros(8)
    transport.irecv(buffer, 0, ACT).wait()
    return buffer


def received(network: HostileNetwork, send: Callable[[MemoryTransport], object]) -> torch.Tensor:
    """What rank 1 receives where rank 0 runs ``send``."""
    got = run_pair(network, send, receive)[1]
    assert isinstance(got, torch.Tensor)
    return got


def core_on(transport: MemoryTransport) -> P2PCore:
    return P2PCore(transport, toy_config())


@FAST_AND_SLOW
def test_memory_that_is_freed_or_written_to_before_the_last_moment(seed: int) -> None:
    """What is freed arrives as NaN, what is written to as it is then."""
    for is_freed in (True, False):
        network = LastMomentNetwork(2, seed=seed)

        def send(transport: MemoryTransport, is_freed: bool = is_freed) -> None:
            tensor = torch.ones(8)
            work = transport.isend(tensor, 1, ACT)
            tensor.fill_(2.0)
            if is_freed:
                del tensor
            work.wait()

        got = received(network, send)
        assert got.isnan().all() if is_freed else (got == 2.0).all()
        assert len(network.violations) == is_freed


@FAST_AND_SLOW
def test_owned_bytes_arrive_although_the_schedule_freed_them(seed: int) -> None:
    """The handle's ownership is enough on a transport that reads at the last moment; the poisoning one shows the early
    release nevertheless.
    """

    def send(transport: MemoryTransport) -> None:
        tensor = torch.ones(8)
        handle = core_on(transport).post_send(tensor, 1, ACT)
        tensor.data = torch.empty(1)
        handle.wait()

    got = received(LastMomentNetwork(2, seed=seed), send)
    assert (got == 1.0).all()
    poisoned = PoisoningNetwork(2, seed=seed)
    got = received(poisoned, send)
    assert got.isnan().all()
    assert "released the memory of a send" in poisoned.violations[0]


@pytest.mark.parametrize("kind", HOSTILE_NETWORKS)
@FAST_AND_SLOW
def test_a_copy_made_for_sending_is_nobodys_early_release(kind: type[HostileNetwork], seed: int) -> None:
    network = kind(2, seed=seed)

    def send(transport: MemoryTransport) -> None:
        tensor = torch.arange(8.0).reshape(2, 4).t()  # not contiguous
        core_on(transport).post_send(tensor, 1, ACT).wait()

    got = received(network, send)
    assert torch.equal(got, torch.arange(8.0).reshape(2, 4).t().reshape(-1))
    assert network.violations == []


@pytest.mark.parametrize("kind", [LastMomentNetwork, ShuffledNetwork])
def test_a_dropped_handle_still_delivers(kind: type[HostileNetwork]) -> None:
    """Also where nobody ever waits on the send: the communicator keeps the handle."""
    network = kind(2, seed=3)
    cores = []

    def send(transport: MemoryTransport) -> None:
        core = core_on(transport)
        cores.append(core)
        core.post_send(torch.ones(8), 1, ACT)

    got = received(network, send)
    assert (got == 1.0).all()
    assert network.transfers == 1


@FAST_AND_SLOW
def test_a_receive_buffer_holds_nan_until_the_bytes_come(seed: int) -> None:
    tensor = torch.ones(8)

    def send(transport: MemoryTransport) -> None:
        transport.isend(tensor, 1, ACT).wait()

    def peek(transport: MemoryTransport) -> tuple[bool, bool]:
        buffer = torch.zeros(8)
        work = transport.irecv(buffer, 0, ACT)
        before = bool(buffer.isnan().all()) or work.is_completed()
        work.wait()
        return before, bool((buffer == 1.0).all())

    _, got = run_pair(ShuffledNetwork(2, seed=seed), send, peek)
    assert got == (True, True)


def test_freeing_a_receive_buffer_is_noted() -> None:
    network = LastMomentNetwork(2, seed=0)

    tensor = torch.ones(8)

    def send(transport: MemoryTransport) -> None:
        transport.isend(tensor, 1, ACT).wait()

    def forget(transport: MemoryTransport) -> None:
        transport.irecv(torch.zeros(8), 0, ACT)

    run_pair(network, send, forget)
    assert "buffer of a receive was freed" in network.violations[0]


def completion_order(seed: int) -> tuple[str, ...]:
    """The order in which five messages of two channels arrive."""
    arrived: list[str] = []
    network = ShuffledNetwork(2, seed=seed)

    def transfer(source: torch.Tensor, target: torch.Tensor) -> None:
        arrived.append(f"{'AG'[int(target.numel() == 2)]}{int(source[0])}")
        target.data.copy_(source.view(target.shape))

    network.transfer = transfer  # type: ignore[method-assign]

    sent: list[torch.Tensor] = []  # the network keeps nothing alive

    def send(transport: MemoryTransport) -> None:
        works = []
        for k in range(5):
            for channel, size in ((ACT, 1), (GRAD, 2)):
                sent.append(torch.full((size,), float(k)))
                works.append(transport.isend(sent[-1], 1, channel))
        for work in works:
            work.wait()

    def receive_all(transport: MemoryTransport) -> None:
        buffers = [(torch.empty(size), channel) for k in range(5) for channel, size in ((ACT, 1), (GRAD, 2))]
        works = [transport.irecv(buffer, 0, channel) for buffer, channel in buffers]
        for work in reversed(works):
            work.wait()

    run_pair(network, send, receive_all)
    return tuple(arrived)


def test_shuffled_completion_is_seeded_keeps_fifo_and_varies() -> None:
    orders = {seed: completion_order(seed) for seed in range(12)}
    assert orders == {seed: completion_order(seed) for seed in range(12)}
    for order in orders.values():
        for channel in "AG":
            mine = [name for name in order if name[0] == channel]
            assert mine == sorted(mine), f"{order}: messages of one channel overtook each other"
    assert len(set(orders.values())) > 4


@pytest.mark.parametrize("kind", HOSTILE_NETWORKS)
def test_a_deadlock_is_noticed_at_once_and_says_who_waits(kind: type[HostileNetwork]) -> None:
    """Both ranks wait on a blocking send before they post their receive: rendezvous never lets them go."""
    network = kind(2, seed=1)

    def exchange(transport: MemoryTransport) -> None:
        core = core_on(transport)
        other = 1 - transport.rank
        core.post_send(torch.ones(8), other, ACT).wait()
        core.post_recv((8,), other, ACT).wait()

    with pytest.raises(P2PError, match=r"send .*rank"):
        run_pair(network, exchange, exchange)


def test_an_error_of_one_rank_ends_the_others() -> None:
    network = LastMomentNetwork(3, seed=5)

    def wait_for_ever(transport: MemoryTransport) -> None:
        core_on(transport).post_recv((8,), 2, ACT).wait()

    def fail(transport: MemoryTransport) -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises((ZeroDivisionError, P2PError)):
        run_pair(network, wait_for_ever, wait_for_ever, fail)
