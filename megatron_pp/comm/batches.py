"""Sends and receives that are posted as one grouped call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_pp.comm.communicator import P2PCore, Receive, Send, is_single_shape
from megatron_pp.comm.transport import P2PRequest
from megatron_pp.comm.wait_handle import UNWATCHED, Tensors, WaitHandle, version_of

_WHAT = "batched send or receive"


def post(core: P2PCore, requests: Sequence[Send | Receive]) -> list[WaitHandle]:
    """``P2PCore.post_batch``, over a transport that groups calls, or where shapes travel."""
    shapes = {} if core.ahead is None else core.ahead.exchange_shapes(core, requests)
    posts: list[P2PRequest] = []
    moved: list[tuple[int, Sequence[torch.Tensor], Tensors | None, int]] = []  # tensors of each request
    for k, request in enumerate(requests):
        received: Tensors | None = None
        version = UNWATCHED
        if isinstance(request, Send):
            tensors: Sequence[torch.Tensor] = core.aliases(request.value, request.dtype)
            version = version_of(tensors)
        else:
            wanted = shapes[k] if shapes else request.shapes
            like = request.requires_grad, request.dtype
            if is_single_shape(wanted):
                received = core.allocate(wanted, *like)
                tensors = [received]
            else:
                received = tensors = [core.allocate(shape, *like) for shape in wanted]
        moved.append((len(posts), tensors, received, version))
        posts += [P2PRequest(received is None, one, request.peer, request.channel) for one in tensors]
    works = core.transport.batch(posts)
    all_in_one = len(works) == 1  # a grouped call may return a single work for all its requests
    handles = []
    for request, (first, tensors, received, version) in zip(requests, moved, strict=True):
        own = tuple(works) if all_in_one else tuple(works[first : first + len(tensors)])
        held = tensors[0] if len(tensors) == 1 else tensors
        handles.append(WaitHandle(core, own, held, received, _WHAT, request.peer, request.channel, version))
    if all_in_one:
        watched = [handle for handle in handles if handle.version != UNWATCHED]
        for handle in handles:
            handle.together = watched
    if core.synchronize_batches:
        torch.cuda.synchronize(core.device)
    return handles
