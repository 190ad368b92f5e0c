"""Shapes that are sent ahead of tensors if shapes vary; in debug mode together with a description of the tensor.

A header is the number of dimensions and the dimensions, as int64, in debug mode with the stamp of the wire check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_pp.comm.communicator import RECEIVE, P2PCore, Receive, Send, is_single_shape
from megatron_pp.comm.transport import P2PRequest
from megatron_pp.comm.wait_handle import WaitHandle
from megatron_pp.errors import P2PShapeError

MAX_DIMENSIONS = 8


def check_dimensions(tensor: torch.Tensor) -> None:
    """Raises P2PShapeError for a tensor with more dimensions than a header can hold."""
    if tensor.dim() > MAX_DIMENSIONS:
        raise P2PShapeError(
            f"a tensor of {tensor.dim()} dimensions cannot be sent with variable_seq_lengths; at most {MAX_DIMENSIONS} "
            "are"
        )


def empty_header(core: P2PCore) -> torch.Tensor:
    """A buffer for what ``header_of`` returns."""
    length = 1 + MAX_DIMENSIONS + (0 if core.wire is None else core.wire.stamp_length)
    return torch.empty(length, dtype=torch.int64, device=core.shape_device)


def header_of(core: P2PCore, tensor: torch.Tensor, member: int = 0) -> torch.Tensor:
    """The announcement of ``tensor``. ``member``: its number in a batch."""
    numbers = [tensor.dim(), *tensor.shape] + [0] * (MAX_DIMENSIONS - tensor.dim())
    if core.wire is not None:
        numbers += core.wire.stamp(tensor.dtype, member)
    return torch.tensor(numbers, dtype=torch.int64, device=core.shape_device)


def decode_header(
    core: P2PCore,
    header: torch.Tensor,
    peer: int,
    what: str,
    expected: Any,
    member: int = 0,
    dtype: torch.dtype | None = None,
) -> list[int]:
    """The shape that a header holds. Raises P2PShapeError if the header holds no shape, and in debug mode
    WireMismatchError if the tensor is not the expected one (``expected``: its shape, None if unknown)."""
    dims, *rest = header.tolist()
    sizes = rest[:MAX_DIMENSIONS]
    if not 0 <= dims <= MAX_DIMENSIONS or any(size < 0 for size in sizes[:dims]):
        raise P2PShapeError(
            f"{what}: a shape of {dims} dimensions {sizes} came; sender and receiver are not at the same message"
        )
    if core.wire is not None:
        dtype = dtype or core.dtype
        assert dtype is not None
        core.wire.check(peer, rest[MAX_DIMENSIONS:], sizes[:dims], core.wire.stamp(dtype, member), expected)
    return sizes[:dims]


def exchange_shapes(core: P2PCore, requests: Sequence[Send | Receive]) -> dict[int, Any]:
    """Send and receive the shapes of a batch; returns request index -> received shape (a list for a list)."""
    posts: list[P2PRequest] = []
    headers: dict[int, list[torch.Tensor]] = {}
    for k, request in enumerate(requests):
        if isinstance(request, Send):
            mine = [header_of(core, alias, k) for alias in core.aliases(request.value, request.dtype)]
        else:
            mine = headers[k] = [empty_header(core) for _ in _listed(request.shapes)]
        posts += [P2PRequest(isinstance(request, Send), header, request.peer, request.channel) for header in mine]
    WaitHandle(core, tuple(core.transport.batch(posts)), posts, None, "exchange of shapes").wait()
    shapes: dict[int, Any] = {}
    for k, received in headers.items():
        expected, peer, *_, dtype = requests[k]
        decoded = [
            decode_header(core, header, peer, f"batched receive from rank {peer}", shape, k, dtype)
            for header, shape in zip(received, _listed(expected), strict=True)
        ]
        shapes[k] = decoded[0] if _is_one(expected) else decoded
    return shapes


class ShapedReceive(WaitHandle):
    """A receive whose shapes are sent ahead of it: ``wait()`` reads each shape, allocates its tensor, and receives it.
    ``shapes``: the expected ones, that is one shape or None, or a list of them for a message of several tensors."""

    _core: P2PCore

    __slots__ = ("_dtype", "_requires_grad", "_shapes")

    def __init__(
        self, core: P2PCore, shapes: Any, peer: int, channel: str, requires_grad: bool, dtype: torch.dtype | None
    ) -> None:
        header = empty_header(core)
        work = core.transport.irecv(header, peer, channel)
        super().__init__(core, (work,), header, None, RECEIVE, peer, channel)
        self._shapes = shapes
        self._requires_grad = requires_grad
        self._dtype = dtype

    def wait(self) -> None:
        if self.tensor is not None or self._works is None:
            super().wait()
            return
        core = self._core
        received = list[torch.Tensor]()
        for expected in _listed(self._shapes):
            if received:
                self._post(empty_header(core))
            header = self._held
            assert isinstance(header, torch.Tensor)
            super().wait()
            shape = decode_header(core, header, self._peer, self.what, expected, dtype=self._dtype)
            received.append(core.allocate(shape, self._requires_grad, self._dtype))
            self._post(received[-1])
            super().wait()
        self.tensor = received[0] if _is_one(self._shapes) else received

    def _post(self, buffer: torch.Tensor) -> None:
        self._held = buffer
        self._works = (self._core.transport.irecv(buffer, self._peer, self._channel),)
        self._core.pending.add(self)


def _is_one(shapes: Any) -> bool:
    """Whether ``shapes`` describes one tensor, not a list of tensors. With variable shapes None does, too."""
    return shapes is None or is_single_shape(shapes)


def _listed(shapes: Any) -> Sequence[Any]:
    return [shapes] if _is_one(shapes) else shapes
