"""Wire check (``config.p2p_debug``): every tensor is announced with its shape, dtype, chunk and microbatch, and the
receiver compares.

It finds schedules and custom communicators that send or receive out of order. With equal shapes such a run would train
on the wrong microbatch without an error. The check costs a small message for each tensor. Receives wait for this
message, so less communication overlaps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_pp.errors import WireMismatchError
from megatron_pp.plan.ir.dataflow import message_of
from megatron_pp.plan.ir.instruction import FORWARD, NONE, TRANSFER_OPS

if TYPE_CHECKING:
    from megatron_pp.runtime.engine.executor import PlanExecutor

_UNKNOWN = -1
_ACTIVATION = 1
_GRADIENT = 2
_KINDS = {_ACTIVATION: "activation", _GRADIENT: "gradient", _UNKNOWN: "message"}


class Stamp(NamedTuple):
    """The description of a message. ``boundary`` s is between stages s and s + 1. A field is -1 if it is not known
    (outside a plan)."""

    dtype: int
    kind: int
    boundary: int
    mb: int
    slice: int = NONE
    tensor: int = 0  # a code of its name; 0 where an edge has one tensor


class WireCheck:
    """One rank's stamps. ``source`` is set while a plan is executed; without one only shape and dtype are compared."""

    stamp_length = len(Stamp._fields)  # int64 each

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.source: PlanExecutor | None = None

    @contextmanager
    def within(self, source: PlanExecutor) -> Iterator[None]:
        """A context in which ``source`` executes its plan. ``source`` holds the communicator, which holds this
        object."""
        self.source = source
        try:
            yield
        finally:
            self.source = None

    def stamp(self, dtype: torch.dtype, member: int = 0) -> Stamp:
        """The stamp of the message that the current instruction sends or expects. ``member``: its place in a batch."""
        at = None if self.source is None else self.source.instruction
        at = at.members[member] if at is not None and at.members else at
        if at is None or at.op not in TRANSFER_OPS:
            return Stamp(_code(dtype), _UNKNOWN, _UNKNOWN, _UNKNOWN)
        message = message_of(at)
        activation = message.kind == FORWARD
        boundary = message.stage - 1 if activation else message.stage
        kind = _ACTIVATION if activation else _GRADIENT
        return Stamp(_code(dtype), kind, boundary, at.mb, at.part, zlib.crc32(at.tensor.encode()))

    def check(self, peer: int, received: list[int], shape: list[int], expected: Stamp, expected_shape: Any) -> None:
        """Compare the announcement of a message from ``peer`` with what is expected here. Raises WireMismatchError."""
        came = Stamp(*received)
        for name, here, there in (
            ("what it is", _KINDS.get(expected.kind), _KINDS.get(came.kind)),
            ("chunk", self._chunk(expected.boundary), self._chunk(came.boundary)),
            ("microbatch", expected.mb, came.mb),
            ("slice", expected.slice, came.slice),
            ("tensor", expected.tensor, came.tensor),
            ("dtype", _name(expected.dtype), _name(came.dtype)),
            ("shape", None if expected_shape is None else list(expected_shape), shape),
        ):
            unknown = name not in ("dtype", "shape") and _UNKNOWN in (expected.kind, came.kind)
            if here != there and not unknown and here is not None:
                raise WireMismatchError(
                    f"pipeline rank {self.rank} expected {self._words(expected, expected_shape)}, but rank {peer} sent "
                    f"{self._words(came, shape)}: {name} differs",
                    field=name,
                    values={self.rank: str(here), peer: str(there)},
                )

    def _chunk(self, boundary: int) -> str:
        """The chunk whose output the message is, or the gradient of whose output: "chunk 0 of rank 1"."""
        if self.source is None or not 0 <= boundary < self.source.placement.num_stages:
            return "unknown"
        rank, chunk = self.source.placement.homes[boundary]
        return f"{chunk} of rank {rank}"

    def _words(self, stamp: Stamp, shape: Any) -> str:
        described = f"{_name(stamp.dtype)} {'of any shape' if shape is None else list(shape)}"
        kind = _KINDS.get(stamp.kind, "unknown message")
        if stamp.kind == _UNKNOWN:
            return f"a {kind}, {described}"
        part = "" if stamp.slice == NONE else f", slice {stamp.slice}"
        return f"the {kind} of chunk {self._chunk(stamp.boundary)}, microbatch {stamp.mb}{part}, {described}"


def _code(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


_DTYPE_NAMES = {_code(d): str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)}


def _name(code: int) -> str:
    return _DTYPE_NAMES.get(code, f"an unknown dtype ({code})")
