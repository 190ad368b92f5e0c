"""A step without a pipeline, on its own or on one rank of a pipeline, and its communicator, which sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.transport import Transport, Work
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import P2PError, ScheduleInputError

if TYPE_CHECKING:
    from megatron_pp.comm.collectives import Collective
    from megatron_pp.runtime.host import Host

_OF_PIPELINES = ("pipeline_schedule", "trace_dir", "measure", "metrics", "microbatch_costs")


def in_a_pipeline(host: Host, settings: StepSettings, size: int) -> StepSettings:
    """The settings of a call without a pipeline that one of ``size`` ranks of a pipeline makes. It leaves out the
    pipeline's communicator, its schedule and its observers. Raises ScheduleInputError where ``host`` has no such
    calls."""
    if not host.local:
        raise ScheduleInputError(
            f"forward_backward_no_pipelining was called in a pipeline of {size} ranks; call what "
            f"get_forward_backward_func({size}) returns"
        )
    host.inputs.p2p_communicator = None
    defaults: dict[str, Any] = dict.fromkeys(_OF_PIPELINES)
    return settings._replace(**defaults)


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
