"""The core of point-to-point communication that the engine uses: post a send, a receive or a batch; each returns a
WaitHandle.

A send goes out on a detached alias of the tensor, and the handle keeps the alias: where the tensor is dropped, or
``deallocate_output_tensor`` swaps its storage, the alias still holds the bytes until the send is done. PyTorch's own
reference is to the tensor *object*, whose storage is swapped along (pytorch#148590), so it does not protect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_pp.comm.transport import Edge, P2PRequest, Preparation, Transport
from megatron_pp.comm.wait_handle import UNWATCHED, Tensors, WaitHandle, version_of
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import CommunicatorClosedError, P2PShapeError, P2PTypeError
from megatron_pp.on_demand import load
from megatron_pp.plan.bounded_cache import BoundedCache

if TYPE_CHECKING:
    from megatron_pp.comm.collectives import Collective
    from megatron_pp.features.offload.host_copies import HostCopies
    from megatron_pp.features.p2p_debug.wire_check import WireCheck

Shape = Sequence[int]
MAX_DIMENSIONS = 8
_SEND, _RECEIVE, _BATCHED = "send", "receive", "batched send or receive"
_HEADER_LENGTH = 1 + MAX_DIMENSIONS
_TEMPLATES, _TEMPLATE = 1 << 20, 1 << 10  # bytes for templates of receive buffers, and of one, roughly


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
        # In debug mode a description travels ahead of each tensor, as a shape does where shapes vary.
        self.wire: WireCheck | None = load("wire_check").WireCheck(self.rank) if settings.p2p_debug else None
        self.variable_shapes = self.shapes_vary or self.wire is not None
        self.patience = timedelta(seconds=settings.p2p_timeout)
        # NCCL's wait with a timeout would block the host; there the fault guard and NCCL's own watchdog keep time.
        self.timeout = None if transport.pollable else self.patience
        self.synchronize_batches = settings.batch_p2p_sync and self.device.type == "cuda"
        self.pending: set[WaitHandle] = set()
        self.under_guard = False
        # One element each, expanded: to allocate like one of them is three times as fast as from shape and dtype.
        self._templates: BoundedCache[tuple[int, ...], torch.Tensor] = BoundedCache(_TEMPLATES)
        self._single_shape: Any = ()  # the last shape that was seen to be one, not a list of them

    @cached_property
    def host_copies(self) -> HostCopies:
        """For copies between this rank's device and host memory."""
        return load("host_copies").host_copies(self.device)

    def post_send(self, value: Tensors, peer: int, channel: str, dtype: torch.dtype | None = None) -> WaitHandle:
        """Post the send of ``value`` (a tensor of ``dtype``, by default ``pipeline_dtype``, on the transport's device,
        or a list of them); never blocks. What is not contiguous is sent as a copy. Raises P2PTypeError for a wrong
        dtype, device or type, CommunicatorClosedError; nothing is posted then."""
        if isinstance(value, torch.Tensor) and not self.variable_shapes:  # the usual case, on the hot path
            if self.transport.aborted:
                self._check_open()
            as_expected = value.dtype is (dtype or self.dtype) and value.device == self.device
            if not as_expected or value.layout is not torch.strided or value.__class__ is not torch.Tensor:
                self._check_sendable(value, dtype)
            alias = value.detach()
            if not alias.is_contiguous():
                alias = alias.contiguous()
            version = UNWATCHED if alias.is_inference() else alias._version
            work = self.transport.isend(alias, peer, channel)
            return WaitHandle(self, (work,), alias, None, _SEND, peer, channel, version)
        held: list[torch.Tensor] = []
        for alias in self._aliases(value, dtype):
            held += [self._header_of(alias), alias] if self.variable_shapes else [alias]
        version = version_of(held)
        works = tuple(self.transport.isend(tensor, peer, channel) for tensor in held)
        return WaitHandle(self, works, held, None, _SEND, peer, channel, version)

    def post_recv(
        self, shapes: Any, peer: int, channel: str, requires_grad: bool = True, dtype: torch.dtype | None = None
    ) -> WaitHandle:
        """Allocate a buffer of ``shapes`` (one shape, or a list: then ``handle.tensor`` is a list) and of ``dtype``, by
        default ``pipeline_dtype``, and post its receive; never blocks. With variable shapes only the number of shapes
        counts; the buffers are allocated in ``wait``."""
        if self.transport.aborted:
            self._check_open()
        if self.variable_shapes:
            return ShapedReceive(self, shapes, peer, channel, requires_grad, dtype)
        if shapes is not self._single_shape and is_single_shape(shapes):
            self._single_shape = shapes
        if shapes is self._single_shape:
            tensor = self.allocate(shapes, requires_grad, dtype)
            work = self.transport.irecv(tensor, peer, channel)
            return WaitHandle(self, (work,), tensor, tensor, _RECEIVE, peer, channel)
        tensors = [self.allocate(shape, requires_grad, dtype) for shape in shapes]
        works = tuple(self.transport.irecv(t, peer, channel) for t in tensors)
        return WaitHandle(self, works, tensors, tensors, _RECEIVE, peer, channel)

    def post_batch(self, requests: Sequence[Send | Receive]) -> list[WaitHandle]:
        """Post all requests as one grouped call. Where shapes travel, they are exchanged before it, in a grouped call
        that is waited for."""
        if not self.variable_shapes and not self.transport.groups_calls:
            return [self.post_send(*one) if isinstance(one, Send) else self.post_recv(*one) for one in requests]
        shapes = self._exchange_headers(requests) if self.variable_shapes else {}
        posts: list[P2PRequest] = []
        moved: list[tuple[int, Sequence[torch.Tensor], Tensors | None, int]] = []  # tensors of each request
        for k, request in enumerate(requests):
            received: Tensors | None = None
            version = UNWATCHED
            if isinstance(request, Send):
                tensors: Sequence[torch.Tensor] = self._aliases(request.value, request.dtype)
                version = version_of(tensors)
            else:
                wanted = shapes[k] if shapes else request.shapes
                like = request.requires_grad, request.dtype
                if is_single_shape(wanted):
                    received = self.allocate(wanted, *like)
                    tensors = [received]
                else:
                    received = tensors = [self.allocate(shape, *like) for shape in wanted]
            moved.append((len(posts), tensors, received, version))
            posts += [P2PRequest(received is None, one, request.peer, request.channel) for one in tensors]
        works = self.transport.batch(posts)
        handles = []
        for request, (first, tensors, received, version) in zip(requests, moved, strict=True):
            # A grouped call may have given a single work for all.
            own = tuple(works) if len(works) == 1 else tuple(works[first : first + len(tensors)])
            held = tensors[0] if len(tensors) == 1 else tensors
            handles.append(WaitHandle(self, own, held, received, _BATCHED, request.peer, request.channel, version))
        if len(works) == 1:
            watched = [handle for handle in handles if handle.version != UNWATCHED]
            for handle in handles:
                handle.together = watched
        if self.synchronize_batches:
            torch.cuda.synchronize(self.device)
        return handles

    def post_collective(self, collective: Collective, what: str) -> WaitHandle:
        """Post a collective of all ranks, which post them in one order; ``what`` it is, in words. The handle keeps what
        ``collective`` holds."""
        self._check_open()
        return WaitHandle(self, (self.transport.collective(collective),), collective, None, what)

    def prepare(self, edges: Iterable[Edge], *sizes: float, batched: bool = False, collectives: bool = False) -> None:
        """``Transport.prepare``, waiting for as long as ``config.p2p_timeout``. ``sizes``: bytes of the activations
        that this rank receives and sends, where they are known."""
        received, sent = sizes or (0, 0)
        needs = Preparation(tuple(edges), batched, self.variable_shapes, received, sent, collectives)
        self.transport.prepare(needs, self.patience)

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
        buffer = torch.empty_like(like)
        return buffer.requires_grad_() if requires_grad else buffer

    def require_dtype(self) -> None:
        """Raises P2PTypeError where ``pipeline_dtype`` is not set, without which nothing can be received."""
        if self.dtype is None:
            raise P2PTypeError(
                "config.pipeline_dtype is None; to receive between stages it must be the dtype of the activations, "
                "as in torch.bfloat16"
            )

    def _aliases(self, value: Tensors, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        """Contiguous detached aliases of what is to be sent, checked before anything is posted."""
        self._check_open()
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        for tensor in tensors:
            self._check_sendable(tensor, dtype)
        return tuple(tensor.detach().contiguous() for tensor in tensors)

    def _check_sendable(self, tensor: Any, dtype: torch.dtype | None) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise P2PTypeError(
                f"a {type(tensor).__name__} cannot be sent between stages; it must be a tensor or a list of tensors"
            )
        if tensor.dtype != (dtype or self.dtype):
            declared = f"config.pipeline_dtype is {self.dtype}" if dtype is None else f"it is declared as {dtype}"
            raise P2PTypeError(
                f"a tensor of {tensor.dtype} cannot be sent between stages: {declared}, and the receiver expects that"
            )
        if tensor.device != self.device:
            raise P2PTypeError(
                f"a tensor on {tensor.device} cannot be sent between stages: this communicator's tensors lie on "
                f"{self.device}"
            )
        plain = tensor.__class__ is torch.Tensor or not is_traceable_wrapper_subclass(tensor)
        if tensor.layout is not torch.strided or not plain:
            raise P2PTypeError(
                f"a {type(tensor).__name__} of layout {tensor.layout} cannot be sent between stages: it is not one "
                "block of memory; give a dense tensor (to_dense(), of a DTensor to_local())"
            )
        if self.variable_shapes and tensor.dim() > MAX_DIMENSIONS:
            raise P2PShapeError(
                f"a tensor of {tensor.dim()} dimensions cannot be sent with variable_seq_lengths; at most "
                f"{MAX_DIMENSIONS} are"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise CommunicatorClosedError(
                f"pipeline rank {self.rank}: this communicator was closed after a failure; make a new one"
            )

    def empty_header(self) -> torch.Tensor:
        """A buffer for what ``_header_of`` returns."""
        length = _HEADER_LENGTH if self.wire is None else _HEADER_LENGTH + self.wire.stamp_length
        return torch.empty(length, dtype=torch.int64, device=self.shape_device)

    def _header_of(self, tensor: torch.Tensor, member: int = 0) -> torch.Tensor:
        """Number of dimensions and the dimensions, as int64; in debug mode also the stamp of the wire check."""
        padded = [tensor.dim(), *tensor.shape] + [0] * (MAX_DIMENSIONS - tensor.dim())
        if self.wire is not None:
            padded += self.wire.stamp(tensor.dtype, member)
        return torch.tensor(padded, dtype=torch.int64, device=self.shape_device)

    def decode_header(
        self,
        header: torch.Tensor,
        peer: int,
        what: str,
        expected: Any = None,
        member: int = 0,
        dtype: torch.dtype | None = None,
    ) -> list[int]:
        """The shape that a header holds. Raises P2PShapeError where it cannot be one; in debug mode WireMismatchError
        where the tensor is not the expected one (``expected``: its shape, None if unknown)."""
        dims, *rest = header.tolist()
        sizes = rest[:MAX_DIMENSIONS]
        if not 0 <= dims <= MAX_DIMENSIONS or any(s < 0 for s in sizes[:dims]):
            raise P2PShapeError(
                f"{what}: a shape of {dims} dimensions {sizes} came; sender and receiver are not at the same message"
            )
        if self.wire is not None:
            dtype = dtype or self.dtype
            assert dtype is not None
            stamp = self.wire.stamp(dtype, member)
            self.wire.check(peer, rest[MAX_DIMENSIONS:], sizes[:dims], stamp, expected)
        return sizes[:dims]

    def _exchange_headers(self, requests: Sequence[Send | Receive]) -> dict[int, Any]:
        """Send and receive the shapes of a batch; returns request index -> received shape (a list for a list)."""
        posts: list[P2PRequest] = []
        headers: dict[int, list[torch.Tensor]] = {}
        for k, request in enumerate(requests):
            if isinstance(request, Send):
                mine = [self._header_of(alias, k) for alias in self._aliases(request.value, request.dtype)]
            else:
                count = 1 if _is_one(request.shapes) else len(request.shapes)
                mine = headers[k] = [self.empty_header() for _ in range(count)]
            posts += [P2PRequest(isinstance(request, Send), header, request.peer, request.channel) for header in mine]
        WaitHandle(self, tuple(self.transport.batch(posts)), posts, None, "exchange of shapes").wait()
        shapes: dict[int, Any] = {}
        for k, received in headers.items():
            expected, peer, *_, dtype = requests[k]
            single = _is_one(expected)
            decoded = [
                self.decode_header(header, peer, f"batched receive from rank {peer}", shape, k, dtype)
                for header, shape in zip(received, [expected] if single else expected, strict=True)
            ]
            shapes[k] = decoded[0] if single else decoded
        return shapes


class ShapedReceive(WaitHandle):
    """A receive whose shapes travel ahead of it: ``wait()`` reads each shape, allocates its tensor, and receives it.
    ``shapes``: what is expected: one shape or None, or a list of them for a message of several tensors."""

    __slots__ = ("_dtype", "_requires_grad", "_shapes")

    def __init__(
        self, core: P2PCore, shapes: Any, peer: int, channel: str, requires_grad: bool, dtype: torch.dtype | None
    ) -> None:
        header = core.empty_header()
        work = core.transport.irecv(header, peer, channel)
        super().__init__(core, (work,), header, None, _RECEIVE, peer, channel)
        self._shapes = shapes
        self._requires_grad = requires_grad
        self._dtype = dtype

    def wait(self) -> None:
        if self.tensor is not None or self._works is None:
            super().wait()
            return
        core, received = self._core, list[torch.Tensor]()
        for expected in [self._shapes] if _is_one(self._shapes) else self._shapes:
            if received:
                self._post(core.empty_header())
            header = self._held
            assert isinstance(header, torch.Tensor)
            super().wait()
            shape = core.decode_header(header, self._peer, self.what, expected, dtype=self._dtype)
            received.append(core.allocate(shape, self._requires_grad, self._dtype))
            self._post(received[-1])
            super().wait()
        self.tensor = received[0] if _is_one(self._shapes) else received

    def _post(self, buffer: torch.Tensor) -> None:
        self._held = buffer
        self._works = (self._core.transport.irecv(buffer, self._peer, self._channel),)
        self._core.pending.add(self)


def _is_one(shapes: Any) -> bool:
    """Whether one tensor is meant, not a list of them; with variable shapes None stands for one."""
    return shapes is None or is_single_shape(shapes)


def is_single_shape(shapes: Any) -> bool:
    """Whether ``shapes`` is one shape (a sequence of whole numbers) rather than a list of shapes."""
    if not isinstance(shapes, (tuple, list)):  # torch.Size is a tuple
        return False
    for size in shapes:  # noqa: SIM110 (called for every receive, and a generator costs more than the answer)
        if not isinstance(size, int):
            return False
    return True
