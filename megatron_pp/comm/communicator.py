"""The core of point-to-point communication that the engine uses: post a send, a receive or a batch; each returns a
WaitHandle.

A send reads a detached alias of the tensor, and the handle keeps the alias. If the tensor is dropped, or
``deallocate_output_tensor`` swaps its storage, the alias holds the bytes until the send is done. PyTorch's own
reference does not protect them: it is to the tensor *object*, whose storage is then another one (pytorch#148590).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_pp.comm.transport import Edge, Preparation, Transport
from megatron_pp.comm.wait_handle import UNWATCHED, Tensors, WaitHandle, version_of
from megatron_pp.common.bounded_cache import BoundedCache
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import CommunicatorClosedError, P2PTypeError
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.spec import BATCHED

if TYPE_CHECKING:
    from megatron_pp.comm.collectives import Collective
    from megatron_pp.comm.parts import MessageCheck

Shape = Sequence[int]
SEND, RECEIVE = "send", "receive"
_TEMPLATES, _TEMPLATE = 1 << 20, 1 << 10  # about as many bytes for all templates of receive buffers, and for each


class Send(NamedTuple):
    """A send for ``post_batch``."""

    value: Tensors
    peer: int
    channel: str
    dtype: torch.dtype | None = None


class Receive(NamedTuple):
    """A receive for ``post_batch``; ``shapes`` is one shape or a list of shapes."""

    shapes: Any
    peer: int
    channel: str
    requires_grad: bool = True
    dtype: torch.dtype | None = None


class P2PCore:
    """Posts sends and receives to peers of one pipeline group and keeps every unfinished handle in ``pending``.

    ``config`` is any object with Megatron's field names, or a step's settings; read once, into ``settings``.
    ``pp_group``: the pipeline group, with ``rank()`` and ``size()``; None for a rank alone.
    ``under_guard``: the fault guard keeps time, and a slow peer that is alive is no error."""

    def __init__(self, transport: Transport, config: Any, pp_group: Any = None) -> None:
        self.transport = transport
        self.pp_group = pp_group
        self.config = config
        self.rank = transport.rank
        self.size = transport.size
        self.device = transport.device
        self.shape_device = transport.device if transport.shape_device is None else transport.shape_device
        self.settings = settings = StepSettings.from_config(config)
        self.dtype = settings.pipeline_dtype
        self.shapes_vary = settings.shapes_vary
        # In debug mode a description is sent ahead of each tensor, as the shape is if shapes vary.
        self.wire: MessageCheck | None = load("wire_check").WireCheck(self.rank) if settings.p2p_debug else None
        self.variable_shapes = self.shapes_vary or self.wire is not None
        self.ahead = load("shapes_ahead") if self.variable_shapes else None
        self._batches = load("batches") if self.variable_shapes or transport.groups_calls else None
        self.patience = timedelta(seconds=settings.timeouts(transport.limit).transfer)
        # NCCL's wait with a timeout would block the host; there the fault guard and NCCL's own watchdog keep time.
        self.timeout = None if transport.pollable else self.patience
        self.synchronize_batches = settings.batch_p2p_sync and settings.policy == BATCHED and self.device.type == "cuda"
        self.pending: set[WaitHandle] = set()
        self.kept_for_features: dict[str, Any] = {}  # state that features keep as long as this communicator lives
        self.under_guard = False
        # Each template is one element, expanded. empty_like of a template is three times as fast as torch.empty.
        self._templates: BoundedCache[tuple[int, ...], torch.Tensor] = BoundedCache(_TEMPLATES)
        self._single_shape: Any = ()  # the last shape that was seen to be one, not a list of them

    def post_send(self, value: Tensors, peer: int, channel: str, dtype: torch.dtype | None = None) -> WaitHandle:
        """Post the send of ``value`` (a tensor of ``dtype``, by default ``pipeline_dtype``, on the transport's device,
        or a list of them); never blocks. A tensor that is not contiguous is sent as a copy. Raises P2PTypeError for a
        wrong dtype, device or type, and CommunicatorClosedError; then nothing was posted."""
        if isinstance(value, torch.Tensor) and not self.variable_shapes:  # the usual case, on the hot path
            if self.transport.aborted:
                self._check_open()
            as_expected = value.dtype is (dtype or self.dtype) and value.device == self.device and not value.is_nested
            if not as_expected or value.layout is not torch.strided or value.__class__ is not torch.Tensor:
                self._check_sendable(value, dtype)
            alias = value.detach()
            if not alias.is_contiguous():
                alias = alias.contiguous()
            version = UNWATCHED if alias.is_inference() else alias._version
            work = self.transport.isend(alias, peer, channel)
            return WaitHandle(self, (work,), alias, None, SEND, peer, channel, version)
        held: list[torch.Tensor] = []
        for alias in self.aliases(value, dtype):
            held += [alias] if self.ahead is None else [self.ahead.header_of(self, alias), alias]
        version = version_of(held)
        works = tuple(self.transport.isend(tensor, peer, channel) for tensor in held)
        return WaitHandle(self, works, held, None, SEND, peer, channel, version)

    def post_recv(
        self, shapes: Any, peer: int, channel: str, requires_grad: bool = True, dtype: torch.dtype | None = None
    ) -> WaitHandle:
        """Allocate a buffer of ``shapes`` (one shape, or a list: then ``handle.tensor`` is a list) and of ``dtype``, by
        default ``pipeline_dtype``, and post its receive; never blocks. With variable shapes only the number of shapes
        counts; the buffers are allocated in ``wait``."""
        if self.transport.aborted:
            self._check_open()
        if self.ahead is not None:
            received: WaitHandle = self.ahead.ShapedReceive(self, shapes, peer, channel, requires_grad, dtype)
            return received
        if shapes is not self._single_shape and is_single_shape(shapes):
            self._single_shape = shapes
        if shapes is self._single_shape:
            tensor = self.allocate(shapes, requires_grad, dtype)
            work = self.transport.irecv(tensor, peer, channel)
            return WaitHandle(self, (work,), tensor, tensor, RECEIVE, peer, channel)
        tensors = [self.allocate(shape, requires_grad, dtype) for shape in shapes]
        works = tuple(self.transport.irecv(t, peer, channel) for t in tensors)
        return WaitHandle(self, works, tensors, tensors, RECEIVE, peer, channel)

    def post_batch(self, requests: Sequence[Send | Receive]) -> list[WaitHandle]:
        """Post all requests as one grouped call. If shapes vary, they are exchanged before, in a grouped call of their
        own that is waited for."""
        if self._batches is None:
            return [self.post_send(*one) if isinstance(one, Send) else self.post_recv(*one) for one in requests]
        handles: list[WaitHandle] = self._batches.post(self, requests)
        return handles

    def post_collective(self, collective: Collective, what: str) -> WaitHandle:
        """Post a collective of all ranks, which must all post their collectives in one order. ``what``: its name in
        errors. The handle keeps what ``collective`` holds."""
        self._check_open()
        return WaitHandle(self, (self.transport.collective(collective),), collective, None, what)

    def prepare(self, edges: Iterable[Edge], *sizes: float, batched: bool = False, collectives: bool = False) -> None:
        """``Transport.prepare``, waiting for as long as ``config.p2p_timeout``. ``sizes``: bytes of the activations
        that this rank receives and sends, where they are known."""
        received, sent = sizes or (0, 0)
        needs = Preparation(tuple(edges), batched, self.variable_shapes, received, sent, collectives)
        self.transport.prepare(needs, self.patience)

    def forget(self) -> None:
        """Drop the handles of an aborted step: they hold tensors, each other and this communicator."""
        for handle in self.pending:
            handle.together = ()
        self.pending.clear()
        self.transport.forget()

    @property
    def closed(self) -> bool:
        """Whether the transport was aborted after a failure, which closes all communicators on it."""
        return self.transport.aborted

    def allocate(self, shape: Shape, requires_grad: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A receive buffer of ``shape`` and ``dtype``, by default ``pipeline_dtype``."""
        if dtype is not None and dtype is not self.dtype:
            return torch.empty(shape, dtype=dtype, device=self.device, requires_grad=requires_grad)
        if self.dtype is None:
            self.require_dtype()
        like = self._templates.entries.get(shape if type(shape) is tuple else tuple(shape))
        if like is None:
            like = torch.empty((), dtype=self.dtype, device=self.device).expand(shape)
            self._templates.put(tuple(shape), like, _TEMPLATE)
        return torch.empty_like(like, requires_grad=requires_grad)

    def require_dtype(self) -> None:
        """Raises P2PTypeError if ``pipeline_dtype`` is not set: a receive needs it for its buffer."""
        if self.dtype is None:
            raise P2PTypeError(
                "config.pipeline_dtype is None; to receive between stages it must be the dtype of the activations, "
                "as in torch.bfloat16"
            )

    def aliases(self, value: Tensors, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        """Contiguous detached aliases of the tensors to send. They are checked here, before anything is posted."""
        self._check_open()
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        for tensor in tensors:
            self._check_sendable(tensor, dtype)
        return tuple(tensor.detach().contiguous() for tensor in tensors)

    def _check_sendable(self, tensor: Any, dtype: torch.dtype | None) -> None:
        from megatron_pp.comm.refused_sends import check_sendable

        check_sendable(tensor, dtype, self.dtype, self.device)
        if self.ahead is not None:
            self.ahead.check_dimensions(tensor)

    def _check_open(self) -> None:
        if self.closed:
            raise CommunicatorClosedError(
                f"pipeline rank {self.rank}: this communicator was closed after a failure; make a new one"
            )


def is_single_shape(shapes: Any) -> bool:
    """Whether ``shapes`` is one shape (a sequence of whole numbers) rather than a list of shapes."""
    if not isinstance(shapes, (tuple, list)):  # torch.Size is a tuple
        return False
    for size in shapes:  # noqa: SIM110 (called for every receive, and a generator costs more than the answer)
        if not isinstance(size, int):
            return False
    return True
