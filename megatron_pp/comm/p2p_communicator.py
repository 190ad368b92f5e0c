"""Point-to-point communication between pipeline stages, with Megatron's method names, signatures and return
conventions.

Everything a method posts is posted before anything is waited. Activations travel to the next rank and gradients to
the previous one on channels of their own, so nothing crosses between one pair of ranks, also when next and previous
are the same rank (P=2).
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore, Receive, Send, Shape, is_single_shape
from megatron_pp.comm.transport import ACT, GRAD, ProcessGroupTransport, Transport
from megatron_pp.comm.wait_handle import Tensors, WaitHandle
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import P2PShapeError
from megatron_pp.plan.spec import BATCHED

__all__ = ["P2PCommunicator", "WaitHandle", "is_single_shape"]

Handles = dict[str, WaitHandle]

# The order of posting. Two ranks that are each other's next and previous on one channel meet only if one of them sends
# where the other receives; activations stand before gradients on both.
_SENDS_FIRST = ("send_next", "recv_prev", "send_prev", "recv_next")
_RECEIVES_FIRST = ("recv_prev", "send_next", "recv_next", "send_prev")

_NOTHING: Any = object()  # nothing to send or receive; as a shape, None is one that is still to come


class P2PCommunicator(P2PCore):
    """Sends to and receives from the neighbours in ``pp_group``.

    pp_group   the pipeline group: a torch ProcessGroup, or, with ``transport``, anything with ``rank()`` and ``size()``
    config     any object with Megatron's field names, and ours where present; read once, but for ``timers``
    transport  what carries the bytes; by default the process group itself

    Methods raise, before anything is posted: P2PTypeError for what is no tensor of ``pipeline_dtype`` on the device of
    the transport, or where ``pipeline_dtype`` is None; P2PShapeError for a shape that is missing, or with variable
    shapes has more than 8 dimensions; CommunicatorClosedError after a failure. What waiting raises: see
    ``WaitHandle.wait``.

    With variable shapes and ``batch_p2p_comm`` or shared channels, shapes are exchanged in a batch of their own: both
    sides of an exchange have to be in matching calls (send_forward_recv_backward with send_backward_recv_forward, not
    with recv_forward and then send_backward), as those of Megatron's schedules are.

    Construction on NCCL creates and warms up the neighbours' communicators and is collective over the group. Shapes
    are in elements, [sequence, microbatch, hidden] in Megatron's models. Receives return tensors with
    ``requires_grad`` set.
    """

    def __init__(self, pp_group: Any, config: Any, transport: Transport | None = None) -> None:
        if transport is None:
            settings = StepSettings.from_config(config)
            transport = ProcessGroupTransport(pp_group, settings.one_way, settings.warm_up_p2p)
        super().__init__(transport, config)
        self.pp_group = pp_group
        self.next_in_group = (self.rank + 1) % self.size
        self.prev_in_group = (self.rank - 1) % self.size
        self.next_rank: int | None = transport.global_rank(self.next_in_group)
        self.prev_rank: int | None = transport.global_rank(self.prev_in_group)
        self.virtual_pipeline_model_parallel_size = self.settings.virtual_pipeline_model_parallel_size
        self.prepare_for_config()

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Tensors | list[None] | None:
        """Receive activations from the previous rank: one tensor for one shape, a list for a list of shapes; None(s)
        on the first stage.
        """
        if is_first_stage:
            return _nothing(tensor_shapes)
        with _Timer(self.config, "forward-recv"):
            return self._exchange(recv_prev=tensor_shapes)[0]

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Tensors | list[None] | None:
        """Receive gradients from the next rank, as ``recv_forward``; None(s) on the last stage."""
        if is_last_stage:
            return _nothing(tensor_shapes)
        with _Timer(self.config, "backward-recv"):
            return self._exchange(recv_next=tensor_shapes)[1]

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send activations (a tensor or a list) to the next rank and wait."""
        if not is_last_stage:
            with _Timer(self.config, "forward-send"):
                self._exchange(send_next=output_tensors)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send gradients (a tensor or a list) to the previous rank and wait."""
        if not is_first_stage:
            with _Timer(self.config, "backward-send"):
                self._exchange(send_prev=input_tensor_grads)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool
    ) -> Tensors | list[None] | None:
        """Send activations to, and receive gradients from, the next rank. A single tensor gives a single gradient, a
        list a list.
        """
        shapes = _shapes_like(output_tensors, tensor_shapes)
        if is_last_stage:
            return _nothing(shapes)
        with _Timer(self.config, "forward-send-backward-recv"):
            return self._exchange(send_next=output_tensors, recv_next=shapes)[1]

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Tensors | list[None] | None:
        """Send gradients to, and receive activations from, the previous rank."""
        shapes = _shapes_like(input_tensor_grads, tensor_shapes)
        if is_first_stage:
            return _nothing(shapes)
        with _Timer(self.config, "backward-send-forward-recv"):
            return self._exchange(send_prev=input_tensor_grads, recv_prev=shapes)[0]

    def send_forward_recv_forward(
        self, output_tensor: torch.Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send to the next rank (unless None), receive from the previous one (if ``recv_prev``).

        With ``overlap_p2p_comm`` nothing is waited and the result is ``(tensor, handles)``, a dict of WaitHandle
        keyed ``send_next``, ``recv_prev``; the tensor may be read after ``handles["recv_prev"].wait()``.
        """
        with _Timer(self.config, "forward-send-forward-recv"):
            got, _, handles = self._exchange(
                send_next=_if_any(output_tensor),
                recv_prev=_if(recv_prev, tensor_shape),
                wait=not overlap_p2p_comm,
            )
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
        with _Timer(self.config, "backward-send-backward-recv"):
            _, got, handles = self._exchange(
                send_prev=_if_any(input_tensor_grad),
                recv_next=_if(recv_next, tensor_shape),
                wait=not overlap_p2p_comm,
            )
        return (got, handles) if overlap_p2p_comm else got

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[Any, Any]:
        """All four at once; returns (input tensor, output gradient)."""
        with _Timer(self.config, "forward-backward-send-forward-backward-recv"):
            got_prev, got_next, _ = self._exchange(
                send_next=_if_any(output_tensor),
                send_prev=_if_any(input_tensor_grad),
                recv_prev=_if(recv_prev, tensor_shape),
                recv_next=_if(recv_next, tensor_shape),
            )
        return got_prev, got_next

    def _exchange(
        self,
        *,
        send_next: Any = _NOTHING,
        send_prev: Any = _NOTHING,
        recv_prev: Any = _NOTHING,
        recv_next: Any = _NOTHING,
        wait: bool = True,
    ) -> tuple[Any, Any, Handles]:
        """Post what is asked for, as one batch or singly; wait unless asked not to. Returns (from previous, from next,
        handles).

        All that is asked for is checked before anything is posted.
        """
        asked: dict[str, Send | Receive] = {}
        if send_next is not _NOTHING:
            asked["send_next"] = self._checked_send(send_next, self.next_in_group, ACT)
        if recv_prev is not _NOTHING:
            asked["recv_prev"] = self._checked_receive(recv_prev, self.prev_in_group, ACT)
        if send_prev is not _NOTHING:
            asked["send_prev"] = self._checked_send(send_prev, self.prev_in_group, GRAD)
        if recv_next is not _NOTHING:
            asked["recv_next"] = self._checked_receive(recv_next, self.next_in_group, GRAD)
        # Where channels are one-way any order is safe, and gloo announces a receive behind what is sent before it.
        # Where one carries both directions, neighbours must not both begin with the same.
        order = _RECEIVES_FIRST if self.settings.one_way or self.rank % 2 else _SENDS_FIRST
        wanted = {name: asked[name] for name in order if name in asked}
        handles = self._post_all(wanted)
        receives = [name for name in wanted if name.startswith("recv")]
        if wait or self.variable_shapes:  # a tensor whose shape is still on its way cannot be returned
            for name in receives:  # first: with variable shapes, the wait is what lets the peer's send go on
                handles[name].wait()
        if wait:
            for name in wanted.keys() - receives:
                handles[name].wait()
        tensors = [handles[name].tensor if name in handles else None for name in ("recv_prev", "recv_next")]
        return tensors[0], tensors[1], handles

    def _checked_send(self, value: Any, peer: int, channel: str) -> Send:
        return Send(list(self._aliases(value)), peer, channel)

    def _checked_receive(self, shapes: Any, peer: int, channel: str) -> Receive:
        if shapes is None and not self.shapes_vary:
            raise P2PShapeError(
                "the shape to receive is None; without config.variable_seq_lengths it must be given, as in "
                "(sequence, microbatch, hidden)"
            )
        self.require_dtype()
        return Receive(shapes, peer, channel)

    def _post_all(self, wanted: dict[str, Send | Receive]) -> Handles:
        # Where one channel carries both directions, shapes that travel ahead of tensors have to go as a batch: singly,
        # a tensor whose receiver has yet to read its shape would hold up the shape that comes the other way.
        apart = self.settings.one_way or not self.variable_shapes
        if wanted and (self.settings.policy == BATCHED or not apart):
            return dict(zip(wanted, self.post_batch(list(wanted.values())), strict=True))
        return {name: self.post_send(*r) if isinstance(r, Send) else self.post_recv(*r) for name, r in wanted.items()}


def _if_any(tensor: torch.Tensor | None) -> Any:
    return _NOTHING if tensor is None else tensor


def _if(wanted: bool, shape: Shape | None) -> Any:
    return shape if wanted else _NOTHING


def _nothing(shapes: Any) -> Any:
    """What a receive returns where there is no neighbour: None, or a list of as many."""
    return None if shapes is None or is_single_shape(shapes) else [None] * len(shapes)


def _shapes_like(tensors: Any, shapes: Any) -> Any:
    """One shape where one tensor is exchanged, a list where a list is."""
    if isinstance(tensors, (list, tuple)):
        return [shapes] if is_single_shape(shapes) else list(shapes)
    return shapes if is_single_shape(shapes) or shapes is None else shapes[0]


class _Timer:
    """Megatron's ``config.timers``, where there are any. Read at each call: a loop may set them late."""

    def __init__(self, config: Any, name: str) -> None:
        timers = getattr(config, "timers", None)
        self._timer = None if timers is None else timers(name, log_level=2)

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.start()

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.stop()
