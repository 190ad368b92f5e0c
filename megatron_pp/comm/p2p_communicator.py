"""Point-to-point communication between pipeline stages, with Megatron's method names, signatures and return
conventions.

A method posts all its operations before it waits for one. Activations travel to the next rank and gradients to the
previous one on separate channels, so messages do not cross, even if both are the same rank (P=2).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_pp.comm.backends import group_transport
from megatron_pp.comm.communicator import P2PCore, Receive, Send, Shape, is_single_shape
from megatron_pp.comm.transport import ACT, GRAD, Transport
from megatron_pp.comm.wait_handle import Tensors, WaitHandle
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import P2PShapeError
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import BATCHED
from megatron_pp.plan.orders import placement_kind

__all__ = ["P2PCommunicator", "WaitHandle", "is_single_shape"]

Handles = dict[str, WaitHandle]

# The order of posting. If two ranks are each other's next and previous on one channel, their operations meet only if
# one sends where the other receives; both post activations before gradients.
_SENDS_FIRST = ("send_next", "recv_prev", "send_prev", "recv_next")
_RECEIVES_FIRST = ("recv_prev", "send_next", "recv_next", "send_prev")
_ACTIVATIONS = ("send_next", "recv_prev")


class P2PCommunicator(P2PCore):
    """Sends to and receives from the neighbours in ``pp_group``.

    pp_group   the pipeline group: a torch ProcessGroup, or, with ``transport``, anything with ``rank()`` and ``size()``
    config     any object with Megatron's field names, and this package's where present. Read once, except ``timers``
    transport  what carries the bytes; by default the process group

    Methods raise before anything is posted: P2PTypeError for anything but tensors of ``pipeline_dtype`` on the device
    of the transport, or if ``pipeline_dtype`` is None; P2PShapeError for a shape that is missing, or has more than 8
    dimensions with variable shapes; CommunicatorClosedError after a failure. ``WaitHandle.wait`` says what waiting
    raises.

    With variable shapes and ``batch_p2p_comm`` or shared channels, shapes are exchanged in a batch of their own. Both
    sides of an exchange must then be in matching calls, as those of Megatron's schedules are:
    send_forward_recv_backward with send_backward_recv_forward, not with recv_forward and then send_backward.

    On NCCL the constructor creates and warms up the neighbours' communicators, so all ranks of the group must call it.
    Shapes are in elements, [sequence, microbatch, hidden] in Megatron's models. Receives return tensors with
    ``requires_grad`` set."""

    def __init__(self, pp_group: Any, config: Any, transport: Transport | None = None) -> None:
        if transport is None:
            settings = StepSettings.from_config(config)
            transport = group_transport(pp_group, settings.one_way, settings.warm_up_p2p, settings.p2p_max_ctas)
        super().__init__(transport, config, pp_group)
        self.next_in_group = (self.rank + 1) % self.size
        self.prev_in_group = (self.rank - 1) % self.size
        self.next_rank: int | None = transport.global_rank(self.next_in_group)
        self.prev_rank: int | None = transport.global_rank(self.prev_in_group)
        self.virtual_pipeline_model_parallel_size = self.settings.virtual_pipeline_model_parallel_size
        # Edges between neighbours of the config's own placement. If no schedule is named, stages are placed in a loop.
        kind = placement_kind(self.settings.pipeline_schedule)
        placement = Placement(kind, self.size, self.virtual_pipeline_model_parallel_size or 1)
        self.prepare(placement.rank_edges, batched=self.settings.policy == BATCHED)

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this is the first rank of the pipeline. Megatron-core has this and the next three since 0.17."""
        return self.rank == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this is the last rank of the pipeline."""
        return self.rank == self.size - 1

    @property
    def total_stages(self) -> int:
        """The number of ranks of the pipeline."""
        return self.size

    @property
    def current_stage(self) -> int:
        """The number of this rank in the pipeline, from 0."""
        return self.rank

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Tensors | list[None] | None:
        """Receive activations from the previous rank: one tensor for one shape, a list for a list of shapes; None(s)
        on the first stage."""
        if is_first_stage:
            return _nothing(tensor_shapes)
        return self._exchange("forward-recv", {"recv_prev": tensor_shapes})[0]

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Tensors | list[None] | None:
        """Receive gradients from the next rank, as ``recv_forward``; None(s) on the last stage."""
        if is_last_stage:
            return _nothing(tensor_shapes)
        return self._exchange("backward-recv", {"recv_next": tensor_shapes})[1]

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send activations (a tensor or a list) to the next rank and wait."""
        if not is_last_stage:
            self._exchange("forward-send", {"send_next": output_tensors})

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send gradients (a tensor or a list) to the previous rank and wait."""
        if not is_first_stage:
            self._exchange("backward-send", {"send_prev": input_tensor_grads})

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool
    ) -> Tensors | list[None] | None:
        """Send activations to, and receive gradients from, the next rank. Returns one gradient for one tensor, a list
        for a list."""
        shapes = _shapes_like(output_tensors, tensor_shapes)
        if is_last_stage:
            return _nothing(shapes)
        return self._exchange("forward-send-backward-recv", {"send_next": output_tensors, "recv_next": shapes})[1]

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Tensors | list[None] | None:
        """Send gradients to, and receive activations from, the previous rank."""
        shapes = _shapes_like(input_tensor_grads, tensor_shapes)
        if is_first_stage:
            return _nothing(shapes)
        return self._exchange("backward-send-forward-recv", {"send_prev": input_tensor_grads, "recv_prev": shapes})[0]

    def send_forward_recv_forward(
        self, output_tensor: torch.Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send to the next rank (unless None), receive from the previous one (if ``recv_prev``). With
        ``overlap_p2p_comm`` it does not wait, and returns ``(tensor, handles)``, a dict of WaitHandle keyed
        ``send_next``, ``recv_prev``. The tensor may be read after ``handles["recv_prev"].wait()``."""
        operations = _operations(tensor_shape, recv_prev=recv_prev, send_next=output_tensor)
        got, _, handles = self._exchange("forward-send-forward-recv", operations, not overlap_p2p_comm)
        return (got, handles) if overlap_p2p_comm else got

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send to the previous rank (unless None), receive from the next one (if ``recv_next``); handles as in
        ``send_forward_recv_forward``, keyed ``send_prev``, ``recv_next``."""
        operations = _operations(tensor_shape, recv_next=recv_next, send_prev=input_tensor_grad)
        _, got, handles = self._exchange("backward-send-backward-recv", operations, not overlap_p2p_comm)
        return (got, handles) if overlap_p2p_comm else got

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[Any, Any]:
        """Both sends and both receives in one call; returns (input tensor, output gradient)."""
        sends = {"send_next": output_tensor, "send_prev": input_tensor_grad}
        operations = _operations(tensor_shape, recv_prev, recv_next, **sends)
        return self._exchange("forward-backward-send-forward-backward-recv", operations)[:2]

    def _exchange(self, timer: str, operations: dict[str, Any], wait: bool = True) -> tuple[Any, Any, Handles]:
        """Check and post ``operations`` (name -> what to send, or the shape to receive), as a batch or singly; wait if
        ``wait``. Returns (from previous, from next, handles)."""
        # With one-way channels any order is safe; on gloo a receive is announced behind what was sent before it. If
        # one channel carries both directions, neighbours must not both begin with a send, or both with a receive.
        order = _RECEIVES_FIRST if self.settings.one_way or self.rank % 2 else _SENDS_FIRST
        with timed(getattr(self.config, "timers", None), timer):  # read at each call: a loop may set them late
            wanted = {name: self._checked(name, operations[name]) for name in order if name in operations}
            handles = self._post_all(wanted)
            receives = [name for name in wanted if name.startswith("recv")]
            if wait or self.variable_shapes:  # a tensor cannot be returned before its shape has arrived
                for name in receives:  # before sends: with variable shapes, this wait lets the peer's send go on
                    handles[name].wait()
            if wait:
                for name in wanted.keys() - receives:
                    handles[name].wait()
        tensors = [handles[name].tensor if name in handles else None for name in ("recv_prev", "recv_next")]
        return tensors[0], tensors[1], handles

    def _checked(self, name: str, value: Any) -> Send | Receive:
        peer = self.next_in_group if name.endswith("next") else self.prev_in_group
        channel = ACT if name in _ACTIVATIONS else GRAD
        if name.startswith("send"):
            return Send(list(self.aliases(value)), peer, channel)
        if value is None and not self.shapes_vary:
            raise P2PShapeError(
                "the shape to receive is None; without config.variable_seq_lengths it must be given, as in "
                "(sequence, microbatch, hidden)"
            )
        self.require_dtype()
        return Receive(value, peer, channel)

    def _post_all(self, wanted: dict[str, Send | Receive]) -> Handles:
        # If one channel carries both directions, shapes must be sent as a batch. Sent singly, a tensor whose receiver
        # has not read its shape yet would block the shape that comes the other way.
        apart = self.settings.one_way or not self.variable_shapes
        if wanted and (self.settings.policy == BATCHED or not apart):
            return dict(zip(wanted, self.post_batch(list(wanted.values())), strict=True))
        return {name: self.post_send(*r) if isinstance(r, Send) else self.post_recv(*r) for name, r in wanted.items()}


def _operations(shape: Shape, recv_prev: bool = False, recv_next: bool = False, **sends: Any) -> dict[str, Any]:
    """For ``_exchange``: sends of the tensors that are not None, and the receives of ``shape`` that are wanted."""
    operations = {name: tensor for name, tensor in sends.items() if tensor is not None}
    wanted = {"recv_prev": recv_prev, "recv_next": recv_next}
    return operations | {name: shape for name, is_wanted in wanted.items() if is_wanted}


def _nothing(shapes: Any) -> Any:
    """The result of a receive without a neighbour: None, or a list with one None for each shape."""
    return None if shapes is None or is_single_shape(shapes) else [None] * len(shapes)


def _shapes_like(tensors: Any, shapes: Any) -> Any:
    """One shape where one tensor is exchanged, a list where a list is."""
    if isinstance(tensors, (list, tuple)):
        return [shapes] if is_single_shape(shapes) else list(shapes)
    return shapes if is_single_shape(shapes) or shapes is None else shapes[0]


@contextmanager
def timed(timers: Any, name: str) -> Iterator[None]:
    """Under one of Megatron's ``config.timers``, if there are any."""
    if timers is None:
        yield
        return
    timer = timers(name, log_level=2)
    timer.start()
    try:
        yield
    finally:
        timer.stop()
