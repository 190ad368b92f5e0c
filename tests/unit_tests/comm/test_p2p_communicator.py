"""``P2PCommunicator`` has Megatron's methods and return conventions, over a transport with rendezvous semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pp.errors import P2PTimeoutError, P2PTypeError
from megatron_pp.p2p_communication import P2PCommunicator, WaitHandle
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup
from testkit.stand_ins.timers import Timers
from testkit.thread_runs.p2p_ranks import (
    SHAPE,
    SHAPES_IN_BATCHES,
    WAYS,
    config_of,
    every_size,
    every_way,
    filled,
    lonely,
    on_ranks,
    same,
)

# -- exchanges: what a rank gets, and what it should get ---------------------------------------------------------------


def alike(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, tuple)):
        return type(got) is type(wanted) and len(got) == len(wanted) and all(map(alike, got, wanted))
    return got is None if wanted is None else same(got, wanted)


def forward_down_the_pipeline(c: P2PCommunicator, rank: int, size: int) -> Any:
    got = c.recv_forward(SHAPE, rank == 0)
    assert c.send_forward(filled(10 + rank), rank == size - 1) is None
    assert got is None or (got.requires_grad and got.is_leaf and got.dtype == torch.float32)
    return got, filled(10 + rank - 1) if rank else None


def backward_up_the_pipeline(c: P2PCommunicator, rank: int, size: int) -> Any:
    got = c.recv_backward(SHAPE, rank == size - 1)
    assert c.send_backward(filled(20 + rank), rank == 0) is None
    return got, filled(20 + rank + 1) if rank < size - 1 else None


def lists_both_ways(c: P2PCommunicator, rank: int, size: int) -> Any:
    """Exchange a list of two tensors, and a list of one, which stays a list."""
    found, wanted = [], []
    for shapes in ([(3, 2, 4), (5, 2, 4)], [SHAPE]):
        found.append(c.recv_forward(shapes, rank == 0))
        c.send_forward([filled(rank, s) for s in shapes], rank == size - 1)
        found.append(c.recv_backward(shapes, rank == size - 1))
        c.send_backward([filled(-rank, s) for s in shapes], rank == 0)
        wanted.append([filled(rank - 1, s) if rank else None for s in shapes])
        wanted.append([filled(-rank - 1, s) if rank < size - 1 else None for s in shapes])
    return found, wanted


def one_forward_one_backward(c: P2PCommunicator, rank: int, size: int) -> Any:
    """Each pair of neighbours: the earlier rank sends forward and receives backward, the later one the other way."""
    down = c.recv_forward(SHAPE, rank == 0)
    up = c.send_forward_recv_backward(filled(rank), SHAPE, rank == size - 1)
    c.send_backward(filled(100 + rank), rank == 0)
    return (down, up), (filled(rank - 1) if rank else None, filled(101 + rank) if rank < size - 1 else None)


def one_backward_one_forward(c: P2PCommunicator, rank: int, size: int) -> Any:
    """The steady state of 1F1B between two ranks."""
    if rank == 0:
        c.send_forward(filled(0), False)
        return [c.send_forward_recv_backward(filled(mb), SHAPE, False) for mb in (1, 2)], [filled(100), filled(101)]
    if rank > 1:
        return None, None
    got = [c.recv_forward(SHAPE, False)]
    got += [c.send_backward_recv_forward(filled(100 + mb), SHAPE, False) for mb in (0, 1)]
    return got, [filled(0), filled(1), filled(2)]


def forward_round_the_ring(c: P2PCommunicator, rank: int, size: int) -> Any:
    return c.send_forward_recv_forward(filled(rank), True, SHAPE), filled((rank - 1) % size)


def backward_round_the_ring(c: P2PCommunicator, rank: int, size: int) -> Any:
    return c.send_backward_recv_backward(filled(rank), True, SHAPE), filled((rank + 1) % size)


def both_directions_at_once(c: P2PCommunicator, rank: int, size: int) -> Any:
    """With two ranks, all four messages run between the same pair, and they are of one shape."""
    found, wanted = [], []
    for step in (0, 10, 20):
        sent = filled(1000 + step + rank), filled(2000 + step + rank)
        found.append(c.send_forward_backward_recv_forward_backward(*sent, True, True, SHAPE))
        wanted.append((filled(1000 + step + (rank - 1) % size), filled(2000 + step + (rank + 1) % size)))
    return found, wanted


def parts_missing_at_the_ends(c: P2PCommunicator, rank: int, size: int) -> Any:
    """The first rank has no activation to receive and no gradient to send; the last one neither of the others."""
    sent = filled(1) if rank < size - 1 else None, filled(2) if rank else None
    got = c.send_forward_backward_recv_forward_backward(*sent, rank > 0, rank < size - 1, SHAPE)
    return got, (filled(1) if rank else None, filled(2) if rank < size - 1 else None)


EXCHANGES = [
    *(forward_down_the_pipeline, backward_up_the_pipeline, lists_both_ways),
    *(one_forward_one_backward, one_backward_one_forward),
    *(forward_round_the_ring, backward_round_the_ring, both_directions_at_once, parts_missing_at_the_ends),
]


@every_size
@pytest.mark.parametrize(
    ("exchange", "way"),
    [(exchange, way) for exchange in EXCHANGES for way in WAYS
     if exchange is not one_forward_one_backward or way not in SHAPES_IN_BATCHES],
)  # fmt: skip
def test_each_exchange_delivers_the_right_tensors(exchange: Any, size: int, way: str) -> None:
    for got, wanted in on_ranks(size, lambda c: exchange(c, c.rank, size), **WAYS[way]):
        assert alike(got, wanted)


@pytest.mark.parametrize("shapes", [SHAPE, list(SHAPE), torch.Size(SHAPE), [SHAPE], [list(SHAPE)]], ids=repr)
@pytest.mark.parametrize("as_list", [False, True], ids=["tensor", "list of tensors"])
def test_a_tensor_is_returned_for_a_tensor_and_a_list_for_a_list(as_list: bool, shapes: Any) -> None:
    """What is sent decides what is returned: a tensor for a tensor, a list for a list, however the shape was given."""

    def body(communicator: P2PCommunicator) -> Any:
        mine: Any = [filled(communicator.rank)] if as_list else filled(communicator.rank)
        if communicator.rank == 0:
            at_the_end = communicator.send_forward_recv_backward(mine, shapes, True)
            return at_the_end, communicator.send_forward_recv_backward(mine, shapes, False)
        at_the_end = communicator.send_backward_recv_forward(mine, shapes, True)
        return at_the_end, communicator.send_backward_recv_forward(mine, shapes, False)

    for rank, (at_the_end, got) in enumerate(on_ranks(2, body)):
        assert at_the_end == ([None] if as_list else None)
        assert isinstance(got, list) == as_list
        assert same(got[0] if as_list else got, filled(1 - rank))


# -- handles ----------------------------------------------------------------------------------------------------------


@every_way
@every_size
def test_with_overlap_handles_come_back_keyed(size: int, way: str) -> None:
    def body(communicator: P2PCommunicator) -> Any:
        down, forward = communicator.send_forward_recv_forward(filled(communicator.rank), True, SHAPE, True)
        up, backward = communicator.send_backward_recv_backward(
            filled(50 + communicator.rank), True, SHAPE, overlap_p2p_comm=True
        )
        assert set(forward) == {"send_next", "recv_prev"}
        assert set(backward) == {"send_prev", "recv_next"}
        assert all(isinstance(h, WaitHandle) for h in (*forward.values(), *backward.values()))
        forward.pop("recv_prev").wait()
        backward.pop("recv_next").wait()
        got = down.clone(), up.clone()
        for handle in (*forward.values(), *backward.values()):
            handle.wait()
            handle.wait()  # waiting again is harmless
            assert handle.is_completed()
        return got

    for rank, (down, up) in enumerate(on_ranks(size, body, **WAYS[way])):
        assert same(down, filled((rank - 1) % size))
        assert same(up, filled(50 + (rank + 1) % size))


def test_only_requested_transfers_have_handles() -> None:
    def body(communicator: P2PCommunicator) -> Any:
        if communicator.rank == 0:
            got, handles = communicator.send_forward_recv_forward(filled(7), False, SHAPE, overlap_p2p_comm=True)
            assert got is None
            assert set(handles) == {"send_next"}
            nothing, none = communicator.send_forward_recv_forward(None, False, SHAPE, overlap_p2p_comm=True)
            assert nothing is None
            assert none == {}
            assert communicator.send_forward_recv_forward(None, False, SHAPE) is None
        else:
            got, handles = communicator.send_forward_recv_forward(None, True, SHAPE, overlap_p2p_comm=True)
            assert set(handles) == {"recv_prev"}
        for handle in handles.values():
            handle.wait()
        return got

    assert same(on_ranks(2, body)[1], filled(7))


def test_overlap_returns_before_the_peer_is_there() -> None:
    """Nothing is waited: one rank posts everything while the other has posted nothing, then both finish."""
    network = MemoryNetwork(2)
    communicators = [P2PCommunicator(ThreadGroup(r, 2), config_of(), network.transport(r)) for r in range(2)]
    results = [c.send_forward_recv_forward(filled(c.rank), True, SHAPE, True) for c in communicators]  # one thread
    for rank, (got, handles) in enumerate(results):
        assert handles["recv_prev"].is_completed()
        handles["recv_prev"].wait()
        assert same(got, filled(1 - rank))
        handles["send_next"].wait()


def test_a_dropped_handle_loses_nothing() -> None:
    network = MemoryNetwork(2)
    sender, receiver = (P2PCommunicator(ThreadGroup(r, 2), config_of(), network.transport(r)) for r in range(2))
    sent = filled(5)
    sender.send_forward_recv_forward(sent, False, SHAPE, overlap_p2p_comm=True)  # handles dropped
    sent.data = torch.zeros(1)
    assert len(sender.pending) == 1
    assert same(receiver.recv_forward(SHAPE, False), filled(5))
    for handle in list(sender.pending):
        handle.wait()
    assert not sender.pending


def test_waiting_without_a_peer_ends_at_the_timeout() -> None:
    communicator = P2PCommunicator(ThreadGroup(0, 2), config_of(p2p_timeout=0.05), MemoryNetwork(2).transport(0))
    with pytest.raises(P2PTimeoutError, match=r"rank 0, send on channel A, with rank 1: not done after 0\.05 s"):
        communicator.send_forward(filled(1), False)


# -- what Megatron's schedules read besides ---------------------------------------------------------------------------


def test_the_communicator_has_megatrons_attributes() -> None:
    communicator = lonely(virtual_pipeline_model_parallel_size=2)
    assert (communicator.prev_rank, communicator.next_rank) == (0, 2)
    assert communicator.virtual_pipeline_model_parallel_size == 2
    assert communicator.pp_group.rank() == 1
    assert communicator.config.pipeline_dtype == torch.float32
    assert lonely().virtual_pipeline_model_parallel_size is None


def test_timers_have_megatrons_names() -> None:
    timers = [Timers(), Timers()]
    names = {
        "forward-send": lambda c, x: c.send_forward(x, False),
        "backward-recv": lambda c, x: c.recv_backward(SHAPE, False),
        "forward-send-backward-recv": lambda c, x: c.send_forward_recv_backward(x, SHAPE, False),
        "forward-recv": lambda c, x: c.recv_forward(SHAPE, False),
        "backward-send": lambda c, x: c.send_backward(x, False),
        "backward-send-forward-recv": lambda c, x: c.send_backward_recv_forward(x, SHAPE, False),
    }
    ring = {
        "forward-send-forward-recv": lambda c, x: c.send_forward_recv_forward(x, True, SHAPE),
        "backward-send-backward-recv": lambda c, x: c.send_backward_recv_backward(x, True, SHAPE),
        "forward-backward-send-forward-backward-recv": lambda c, x: c.send_forward_backward_recv_forward_backward(
            x, x, True, True, SHAPE
        ),
    }
    expected = [[*list(names)[:3], *ring], [*list(names)[3:], *ring]]

    def body(communicator: P2PCommunicator) -> None:
        communicator.config.timers = timers[communicator.rank]
        for name in expected[communicator.rank]:
            {**names, **ring}[name](communicator, filled(1))
        communicator.recv_forward(SHAPE, True)  # no neighbour there, no timer

    on_ranks(2, body)
    for mine, called in zip(timers, expected, strict=True):
        assert mine.lines == [f"{name} {what}" for name in called for what in ("start", "stop")]
        assert mine.levels == dict.fromkeys(called, 2)


def test_a_timer_stops_when_the_exchange_fails() -> None:
    timers = Timers()
    with pytest.raises(P2PTypeError):
        lonely(timers=timers).send_forward(filled(1).double(), False)
    assert timers.lines == ["forward-send start", "forward-send stop"]
