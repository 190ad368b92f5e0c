"""Transfers over NCCL: the host never waits for them, the current stream does.

Each one-way channel has a communicator of its own, which is warmed up when it is made. Batches use the given group, so
plans that send only batches make no channels for tensors. Shapes that are sent ahead of tensors go from host to host
over gloo: the host needs them, and over NCCL it would have to wait for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_pp.comm.channels import SHAPES, ChannelGroups, ChannelKey, channels_of, group_around
from megatron_pp.comm.group_transport import GroupTransport
from megatron_pp.comm.transport import P2PRequest, Preparation, Work
from megatron_pp.errors import P2PError
from megatron_pp.plan.costs.transports import MAX_CTAS

if TYPE_CHECKING:
    from megatron_pp.comm.collectives import Collective

logger = logging.getLogger("megatron_pp")


class NcclTransport(GroupTransport):
    """``max_ctas``: ``config.p2p_max_ctas``."""

    backend = "nccl"
    pollable = True
    blocks_host = False

    def __init__(self, group: dist.ProcessGroup, one_way: bool, warm_up: bool, max_ctas: int | None) -> None:
        super().__init__(group, one_way)
        self.warm_up, self.max_ctas = warm_up, max_ctas
        self._collective_stream: Any = None

    def prepare(self, needs: Preparation, timeout: timedelta) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise P2PError(
                "a whole pipeline step cannot be captured in a CUDA graph, because it polls its transfers: capture "
                "layers instead"
            )
        super().prepare(needs, timeout)

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        return self._post("send", (self.rank, peer, channel), tensor, peer)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        return self._post("recv", (peer, self.rank, channel), tensor, peer)

    def _post(self, method: str, key: ChannelKey, tensor: torch.Tensor, peer: int) -> Work:
        channel = key[2]
        if not tensor.is_cuda:
            return self._post_shape(method, tensor, peer, channel)
        own = self._channels.get(key) if self._channels else None
        group, end = (self.group, peer) if own is None else own
        try:
            return getattr(group, method)([tensor], end, self._tags[channel])
        except RuntimeError as error:
            what = "send on channel {} to" if method == "send" else "receive on channel {} from"
            self._post_failed(error, f"{what.format(channel)} rank {peer}")

    def batch(self, requests: Sequence[P2PRequest]) -> Sequence[Work]:
        if not requests[0].tensor.is_cuda:  # shapes
            return super().batch(requests)
        ops = [
            dist.P2POp(dist.isend if r.is_send else dist.irecv, r.tensor, self.global_rank(r.peer), self.group)
            for r in requests
        ]
        try:
            return dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            self._post_failed(error, f"batch of {len(ops)} sends and receives")

    def _post_shape(self, method: str, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        own = self._channels.get((min(self.rank, peer), max(self.rank, peer), SHAPES))
        if own is None or self._groups is None:
            raise P2PError(f"pipeline rank {self.rank}: no channel for shapes was made with rank {peer}")
        try:
            work = getattr(own.group, method)([tensor], own.peer, self._tags[channel])
        except RuntimeError as error:
            self._post_failed(error, f"shape on channel {channel}, with rank {peer}")
        from megatron_pp.comm.nccl.shape_transfer import ShapeTransfer

        return ShapeTransfer(work, self._groups)

    def collective(self, collective: Collective) -> Work:
        assert self._collectives is not None, "prepare() makes the communicator"
        if self._collective_stream is None:
            self._collective_stream = torch.cuda.Stream(self.device, priority=-1)
        from megatron_pp.comm.collectives import OnStream

        return OnStream(collective, self._collectives, self._collective_stream)

    def made_groups(self, *of_pipeline: Any) -> ChannelGroups:
        return NcclChannels(*of_pipeline, max_ctas=self.max_ctas)

    def _what_counts(self, needs: Preparation) -> Preparation:
        """``needs`` without sizes."""
        return needs._replace(received_bytes=0, sent_bytes=0)

    def _channels_for(self, needs: Preparation) -> list[ChannelKey]:
        with_tensors = self.one_way and not needs.batched
        keys = channels_of(self.rank, needs.edges, needs.with_shapes)
        return [key for key in keys if with_tensors or key[2] == SHAPES]

    def _warm_up(self, needs: Preparation, made: list[ChannelKey]) -> None:
        """Send small messages, so that the communicators that ``needs`` uses exist before the first step. The first
        operation makes a communicator, and the host then waits for the other end. Within a step that could hang: a
        receive is posted ahead of work that the other end waits for. The first batch makes the group's communicator,
        for which all ranks are needed; none of them may wait for shapes then."""
        on_channels = self.one_way and not needs.batched
        if not self.warm_up and not on_channels and not (needs.batched and needs.with_shapes):
            return
        keys = [key for key in made if key[2] != SHAPES] if on_channels else channels_of(self.rank, needs.edges)
        tokens = [self._token(*key) for key in keys]
        if not tokens:  # a pipeline of one rank, or there is no new channel
            return
        groups = [self._channels[key].group for key in keys] if on_channels else [self.group]
        if needs.batched:
            for work in self.batch(tokens):
                work.wait()
        else:  # one after the other
            for token in tokens:
                (self.isend if token.is_send else self.irecv)(*token[1:]).wait()
                self._end_if_aborted(groups, "a communicator")
        self._end_if_aborted(groups, "a communicator")
        torch.cuda.synchronize(self.device)

    def _token(self, source: int, target: int, channel: str) -> P2PRequest:
        is_send = source == self.rank
        return P2PRequest(is_send, torch.zeros(1, device=self.device), target if is_send else source, channel)


class NcclChannels(ChannelGroups):
    """Channels of tensors use NCCL, with the options of the pipeline group. Channels of shapes use gloo."""

    def __init__(self, *of_pipeline: Any, max_ctas: int | None) -> None:
        super().__init__(*of_pipeline)
        self.max_ctas = max_ctas

    def connect(
        self, kind: str, store: dist.Store, end: int, ranks: list[int], name: str, patience: timedelta
    ) -> dist.ProcessGroup:
        if kind == SHAPES:
            return super().connect(kind, store, end, ranks, name, patience)
        options = channel_options(self.options, self.max_ctas)
        options._timeout, options.global_ranks_in_group, options.group_name = self.timeout, ranks, name
        backend = dist.ProcessGroupNCCL(store, end, len(ranks), options)
        device = torch.device("cuda", torch.cuda.current_device())
        return group_around(backend, device, dist.ProcessGroup.BackendType.NCCL, store, end, len(ranks))

    def follow_timeout(self, timeout: timedelta) -> None:
        super().follow_timeout(timeout)
        for (_, _, kind), channel in self.channels.items():
            if kind != SHAPES:
                channel.group._get_backend(torch.device("cuda"))._set_default_timeout(timeout)

    def end(self, group: dist.ProcessGroup) -> None:
        if self.aborted:
            return
        try:
            group.shutdown()
        except RuntimeError as error:  # the communicator is not needed any more, so this is only logged
            logger.warning("closing an NCCL communicator: %s", error)


def channel_options(pipeline: Any, max_ctas: int | None) -> Any:
    """``ProcessGroupNCCL.Options`` of a channel: the NCCL settings that the pipeline group was made with (``pipeline``,
    its options), on a stream of high priority: neither ``torch.cuda.Stream()`` nor the communicators of other groups
    take their streams from that pool by default. A kernel that waits for its peer occupies all thread blocks (CTAs, of
    640 threads) that its communicator may use, and receives are posted ahead. So their number is limited, far below
    NCCL's default (32 on Hopper).

    ``max_ctas``: the most thread blocks for each transfer; None: the pipeline group's number, or 8 if it has none."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    unset: Any = dist.ProcessGroupNCCL.Options().config
    given = pipeline.config
    for name in dir(given):
        value = getattr(given, name)
        if not name.startswith("_") and value is not None and not callable(value):
            setattr(options.config, name, value)
    if max_ctas is None and given.max_ctas == unset.max_ctas:
        # NCCL refuses a maximum below the minimum.
        max_ctas = MAX_CTAS if given.min_ctas == unset.min_ctas else max(MAX_CTAS, given.min_ctas)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options
