"""Makes the transport over a process group. Only the module of the group's own backend is loaded."""

import torch.distributed as dist

from megatron_pp.comm.group_transport import GroupTransport, backend_of


def group_transport(
    group: dist.ProcessGroup, one_way: bool = True, warm_up: bool = True, max_ctas: int | None = None
) -> GroupTransport:
    """The transport over ``group``. ``one_way``: channels of one direction (``config.p2p_channels``); ``warm_up``,
    ``max_ctas``: ``config.warm_up_p2p`` and ``config.p2p_max_ctas``, for NCCL only. On NCCL this may be collective."""
    if backend_of(group) == "nccl":
        from megatron_pp.comm.nccl.nccl_transport import NcclTransport

        return NcclTransport(group, one_way, warm_up, max_ctas)
    from megatron_pp.comm.gloo.gloo_transport import GlooTransport

    return GlooTransport(group, one_way)
