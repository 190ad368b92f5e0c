"""Small messages on gloo: what is sent is a copy, and sends are not waited for one by one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.comm.transport import ACT
from megatron_pp.testing.memory_transport import End, MemoryNetwork, MemoryTransport, MemoryWork, Queue
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import ToyData, reference_run, toy_config

POLICIES = {"overlap": {"overlap_p2p_comm": True}, "batched": {"batch_p2p_comm": True}, "plain": {}}


class CopyingNetwork(MemoryNetwork):
    """As gloo's transport does it. Counts waits for sends."""

    copied_below = 1 << 16

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sends: set[MemoryWork] = set()
        self.send_waits = 0

    def transport(self, rank: int) -> MemoryTransport:
        transport = super().transport(rank)
        transport.groups_calls = False
        transport.copied_below = self.copied_below
        return transport

    def post(self, rank: int, queue: Queue, ends: list[End]) -> MemoryWork:
        is_send, work = ends[0].is_send, super().post(rank, queue, ends)
        self.sends |= {work} if is_send else set()
        return work

    def wait(self, work: MemoryWork, timeout: timedelta | None) -> None:
        with self.changed:
            self.send_waits += work in self.sends
        super().wait(work, timeout)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_wait_for_sixteen_sends(policy: str) -> None:
    network, data = CopyingNetwork(2), ToyData(20)
    result = run_in_threads(2, 2, data, network=network, **POLICIES[policy])
    assert result.difference(reference_run(4, data)) == 0.0
    # Of each kind 40 messages go one way between the ranks and 20 the other: 2 + 1 and 1 + 1 waits.
    assert network.send_waits == 2 * (3 + 2)


@pytest.mark.parametrize("fields", [{"variable_seq_lengths": True}, {"p2p_debug": True}], ids=str)
def test_not_where_a_header_travels_ahead(fields: dict[str, Any]) -> None:
    network, data = CopyingNetwork(2), ToyData(3, variable="variable_seq_lengths" in fields)
    assert run_in_threads(2, 1, data, network=network, **fields).difference(reference_run(2, data)) == 0.0
    assert network.send_waits >= 6


def test_what_was_sent_may_be_written_to() -> None:
    network = CopyingNetwork(2)
    first, second = (P2PCommunicator(ThreadGroup(rank, 2), toy_config(), network.transport(rank)) for rank in range(2))
    sent = torch.arange(8.0, dtype=first.dtype)
    handle = first.post_send(sent, 1, ACT)
    assert handle.copied
    sent.zero_()
    received = second.post_recv((8,), 0, ACT)
    received.wait()
    assert received.tensor.tolist() == list(range(8))


def test_large_messages_are_sent_as_they_are() -> None:
    network = CopyingNetwork(2)
    network.copied_below = 64
    communicator = P2PCommunicator(ThreadGroup(0, 2), toy_config(), network.transport(0))
    assert not communicator.post_send(torch.zeros(16, dtype=communicator.dtype), 1, ACT).copied
