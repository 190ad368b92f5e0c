"""The transport of a pipeline of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_pp.comm.collectives import Collective, Done, LoneCollectives
from megatron_pp.comm.transport import P2PRequest, Transport, Work
from megatron_pp.errors import P2PError


class SoloTransport(Transport):
    """A pipeline of one rank: no transfers, no process group."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        raise P2PError(f"a pipeline of one rank cannot exchange tensors with rank {peer}")

    irecv = isend

    def collective(self, collective: Collective) -> Work:
        collective(LoneCollectives())
        return Done()

    def batch(self, requests: Sequence[P2PRequest]) -> Sequence[Work]:
        return [self.isend(*request[1:]) for request in requests]

    def global_rank(self, rank: int) -> int:
        return dist.get_rank() if dist.is_initialized() else 0
