"""The communicator of a pipeline of one rank, which sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.transport import Transport, Work
from megatron_pp.errors import P2PError

if TYPE_CHECKING:
    from megatron_pp.comm.collectives import Collective


def lone_communicator(config: Any, model: torch.nn.Module) -> P2PCore:
    """For a pipeline of one rank without any process group."""
    parameter = next(iter(model.parameters()), None)
    return P2PCore(SoloTransport(torch.device("cpu") if parameter is None else parameter.device), config)


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
        from megatron_pp.comm.collectives import Done, LoneCollectives

        collective(LoneCollectives())
        return Done()

    def global_rank(self, rank: int) -> int:
        return dist.get_rank() if dist.is_initialized() else 0
