"""GPU memory that a process takes beside what torch allocates: NCCL's communicators and the CUDA context.

Sizes are of NVLink; the page "Inside" says where they are from and how to lower them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pp.plan.costs.transports import MAX_CTAS
from megatron_pp.plan.ir.feature import hooks_of
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import BATCHED, ONE_WAY

MIB = 2**20
CONTEXT = 534 * MIB  # of a process on an H100 (meta-pytorch/torchcomms#777)
# Bytes of a peer in each of NCCL's channels (NVIDIA/nccl#1685).
RECEIVING = 10 * MIB
SENDING = 2 * MIB
MEASURED_MORE = 516 * MIB
"""What a process took beyond the estimate in the one measurement: 1,242 MiB beside what torch reserved, where the
estimate is 726 MiB, of a rank of two on one H200, with NCCL 2.28.9 over sockets (docs/gpu_results.md, "contexts"). The
number has NCCL's buffers for a network, which were 512 MiB elsewhere (NVIDIA/nccl#2363), and the kernels of libraries.
Nothing was measured over NVLink.
"""
_UNLIMITED = 32  # the pipeline group's then (NVIDIA/nccl#1685)


def measured_at_most(estimated: float) -> float:
    """Bytes that a process takes beside what torch allocates, as far as was measured, if ``estimated`` bytes are
    estimated for communicators and context; 0 if nothing is estimated.
    """
    return estimated + MEASURED_MORE if estimated else 0.0


@dataclass(frozen=True)
class Communicators:
    """The communicators of one kind that a rank is a member of.

    count      of them
    receiving  peers that the rank receives from, over all of them
    sending    peers that it sends to
    channels   NCCL's channels in each, at most
    """

    kind: str
    count: int
    receiving: int
    sending: int
    channels: int

    @property
    def nbytes(self) -> int:
        return self.channels * (self.receiving * RECEIVING + self.sending * SENDING)


class Outside(NamedTuple):
    """Beside what torch allocates.

    context   bytes of the CUDA context
    max_ctas  of ``p2p_max_ctas`` and of the pipeline group's options; None: neither is set
    """

    context: float = CONTEXT
    max_ctas: int | None = None

    def communicators(self, placement: Placement, rank: int, policy: str, channels: str) -> Iterator[Communicators]:
        """The communicators that NCCL's transport makes for ``rank``. ``policy``, ``channels``: as in PlanSpec."""
        edges = [edge for edge in placement.rank_edges if rank in edge]
        ours = self.max_ctas or MAX_CTAS
        if edges and channels == ONE_WAY and policy != BATCHED:
            yield Communicators("one-way channels", 2 * len(edges), len(edges), len(edges), ours)
        elif edges:
            # torch makes one of the group for batches, and one of every two ranks for single operations.
            peers = len({*sum(edges, ())} - {rank})
            count = 1 if policy == BATCHED else peers
            yield Communicators("pipeline group", count, peers, peers, self.max_ctas or _UNLIMITED)
        if placement.pipeline_size > 1:
            words = (hooks.ring_words for hooks in hooks_of((), placement.barriers))
            yield from (Communicators(of, 1, 1, 1, ours) for of in words if of)

    def nbytes(self, placement: Placement, policy: str, channels: str = ONE_WAY) -> tuple[float, ...]:
        """Bytes of the communicators of each rank."""
        ranks = range(placement.pipeline_size)
        made = (self.communicators(placement, rank, policy, channels) for rank in ranks)
        return tuple(self.context + sum(one.nbytes for one in each) for each in made)
