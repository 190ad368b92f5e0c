"""The hostile networks themselves: they keep to the rules, and repeat by seed.

``runtime/engine/test_mutants_executor.py`` shows that they catch what they are made for, and nothing else.
"""

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
    ShuffledNetwork,
)
from megatron_pp.testing.memory_transport import MemoryTransport
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import toy_config


def run_pair(network: HostileNetwork, *mains: Callable[[MemoryTransport], object]) -> list[object]:
    """Each function runs as one rank and is given its transport."""

    def rank_main(rank: int) -> object:
        with network.running(rank):
            return mains[rank](network.transport(rank))

    return run_ranks(len(mains), rank_main, network.abort, 20.0)


def core_on(transport: MemoryTransport) -> P2PCore:
    return P2PCore(transport, toy_config())


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
def test_a_deadlock_is_detected_immediately_and_names_the_waiting_ranks(kind: type[HostileNetwork]) -> None:
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
