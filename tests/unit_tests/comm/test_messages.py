"""What ``P2PCommunicator`` sends and receives: shapes of any rank, layouts; and what it refuses before it posts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_pp.comm.communicator import is_single_shape
from megatron_pp.errors import P2PError, P2PShapeError, P2PTypeError
from megatron_pp.p2p_communication import P2PCommunicator
from testkit.thread_runs.p2p_ranks import SHAPE, WAYS, every_way, filled, lonely, on_ranks, same

# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True], ids=["singly", "batched"])
@pytest.mark.parametrize("dims", range(9))
def test_variable_shapes_of_any_rank(dims: int, batched: bool) -> None:
    """What is expected does not matter, not even the number of dimensions: the shape travels."""
    shape = tuple(range(1, dims + 1))[:5] + (1, 2, 1)[: max(0, dims - 5)]
    assert len(shape) == dims
    sent = torch.arange(filled(0, shape).numel(), dtype=torch.float32).view(shape)

    def body(communicator: P2PCommunicator) -> Any:
        down = communicator.send_forward_recv_forward(sent + communicator.rank, True, None)
        communicator.send_backward(sent, communicator.rank == 0)
        up = communicator.recv_backward(SHAPE, communicator.rank == 1)
        return down, up

    results = on_ranks(2, body, variable_seq_lengths=True, batch_p2p_comm=batched)
    for rank, (down, _) in enumerate(results):
        assert same(down, sent + (1 - rank))
    assert same(results[0][1], sent)


@every_way
@pytest.mark.parametrize(
    "sent",
    [filled(1, (2,) * dims) for dims in (0, 1, 3, 8)]
    + [torch.empty(0, 2, 4), torch.arange(24.0).view(4, 2, 3).permute(2, 1, 0)],
    ids=["0d", "1d", "3d", "8d", "empty", "not contiguous"],
)
def test_tensors_arrive_as_they_are(sent: torch.Tensor, way: str) -> None:
    received = on_ranks(2, lambda c: c.send_forward_recv_forward(sent, True, sent.shape), **WAYS[way])
    assert all(same(got, sent) for got in received)


def test_fixed_shapes_may_have_more_dimensions_than_a_header_holds() -> None:
    sent = filled(1, (2,) * 9)
    assert same(on_ranks(2, lambda c: c.send_forward_recv_forward(sent, True, sent.shape))[0], sent)


def test_each_microbatch_may_have_its_own_shape() -> None:
    lengths = [3, 1, 7, 2]

    def body(communicator: P2PCommunicator) -> list[Any]:
        if communicator.rank == 0:
            return [communicator.send_forward(filled(n, (n, 2, 4)), False) for n in lengths]
        return [communicator.recv_forward(SHAPE, False) for _ in lengths]

    received = on_ranks(2, body, variable_seq_lengths=True)[1]
    assert [tuple(t.shape) for t in received] == [(n, 2, 4) for n in lengths]
    assert [t[0, 0, 0].item() for t in received] == lengths


def test_sent_tensors_carry_no_graph() -> None:
    def body(communicator: P2PCommunicator) -> Any:
        weight = torch.ones(SHAPE, requires_grad=True)
        return communicator.send_forward_recv_forward(weight * (communicator.rank + 1), True, SHAPE)

    got = on_ranks(2, body)[0]
    assert same(got.detach(), filled(2))
    assert got.grad_fn is None


def test_is_single_shape_tells_a_shape_from_a_list_of_shapes() -> None:
    assert all(is_single_shape(one) is True for one in ((3, 2, 4), [3, 2, 4], torch.Size([3]), torch.Size([])))
    assert all(is_single_shape(one) is False for one in ([(3, 2)], [[3, 2, 4], [1]], [torch.Size([3])], None, 7))


# -- bad input: refused before anything is posted ---------------------------------------------------------------------


GOOD = filled(1)
BAD_TENSORS: dict[str, tuple[Any, str]] = {
    "dtype": (GOOD.double(), "a tensor of torch.float64 cannot be sent between stages: config.pipeline_dtype is torch"),
    "device": (GOOD.to("meta"), "a tensor on meta cannot be sent between stages: this communicator's tensors lie on c"),
    "nested": (torch.nested.as_nested_tensor([GOOD[0]]), "a nested Tensor of layout torch.strided cannot be sent"),
    "nested in a list": ([GOOD, torch.nested.as_nested_tensor([GOOD[0]])], "a nested Tensor of layout torch.strided"),
    "dict": ({"x": GOOD}, "a dict cannot be sent between stages; it must be a tensor or a list of tensors"),
    "float": (1.5, "a float cannot be sent between stages"),
    "none in a list": ([GOOD, None], "a NoneType cannot be sent between stages"),
    "wrong in a list": ([GOOD, GOOD.half()], "a tensor of torch.float16 cannot be sent between stages"),
}


SENDS: list[Callable[[P2PCommunicator, Any], Any]] = [
    lambda c, value: c.send_forward(value, False),
    lambda c, value: c.send_backward(value, False),
    lambda c, value: c.send_forward_recv_backward(value, SHAPE, False),
    lambda c, value: c.send_backward_recv_forward(value, SHAPE, False),
    lambda c, value: c.send_forward_recv_forward(value, True, SHAPE),
    lambda c, value: c.send_backward_recv_backward(value, True, SHAPE, overlap_p2p_comm=True),
    lambda c, value: c.send_forward_backward_recv_forward_backward(GOOD, value, True, True, SHAPE),
]


@pytest.mark.parametrize("way", ["plain", "batched", "variable", "variable batched"])
@pytest.mark.parametrize("bad", BAD_TENSORS)
def test_wrong_tensors_are_refused_before_anything_is_posted(bad: str, way: str) -> None:
    value, words = BAD_TENSORS[bad]
    for send in SENDS:
        with pytest.raises(P2PTypeError) as caught:
            send(lonely(**WAYS[way]), value)
        assert words in str(caught.value)
        assert isinstance(caught.value, (P2PError, TypeError))


@pytest.mark.parametrize("send", SENDS[:4])
def test_nothing_can_be_sent_in_place_of_a_tensor(send: Callable[[P2PCommunicator, Any], Any]) -> None:
    """None is an option where the signature says so; elsewhere the peer would wait for it forever."""
    with pytest.raises(P2PTypeError, match="a NoneType cannot be sent between stages"):
        send(lonely(), None)


RECEIVES: list[Callable[[P2PCommunicator, Any], Any]] = [
    lambda c, shape: c.recv_forward(shape, False),
    lambda c, shape: c.recv_backward(shape, False),
    lambda c, shape: c.send_forward_recv_forward(GOOD, True, shape),
    lambda c, shape: c.send_backward_recv_backward(GOOD, True, shape, overlap_p2p_comm=True),
    lambda c, shape: c.send_forward_backward_recv_forward_backward(GOOD, GOOD, True, True, shape),
]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("receive", RECEIVES)
def test_a_missing_shape_is_refused(receive: Callable[[P2PCommunicator, Any], Any], batched: bool) -> None:
    with pytest.raises(P2PShapeError, match="the shape to receive is None; without config"):
        receive(lonely(batch_p2p_comm=batched), None)


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("receive", RECEIVES[:2])
def test_receiving_without_a_dtype_is_refused(receive: Callable[[P2PCommunicator, Any], Any], variable: bool) -> None:
    with pytest.raises(P2PTypeError, match="pipeline_dtype is None; to receive between stages it must be"):
        receive(lonely(pipeline_dtype=None, variable_seq_lengths=variable), SHAPE)


@pytest.mark.parametrize("batched", [False, True])
def test_more_dimensions_than_a_header_holds_are_refused(batched: bool) -> None:
    nine = torch.zeros((1,) * 9)
    with pytest.raises(
        P2PShapeError, match="a tensor of 9 dimensions cannot be sent with variable_seq_lengths; at mos"
    ):
        lonely(variable_seq_lengths=True, batch_p2p_comm=batched).send_forward([GOOD, nine], False)
