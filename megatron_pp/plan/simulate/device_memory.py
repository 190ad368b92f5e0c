"""All that a rank's GPU holds when torch has allocated most: that, and what torch does not allocate."""

from collections.abc import Iterable
from typing import NamedTuple

from megatron_pp.plan.costs.communicators import Communicators, Outside, measured_at_most
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.simulate.memory import Parts, RankMemory


class DeviceMemory(NamedTuple):
    """Bytes of one rank.

    parameters     with gradients and optimizer states
    allocated      the parts of the rest that torch allocates
    communicators  of NCCL
    context        of CUDA
    at             the instruction after which ``allocated`` is most
    host           most in host memory at the same time
    """

    parameters: float
    allocated: Parts
    communicators: tuple[Communicators, ...]
    context: float
    at: str
    host: float

    @property
    def pinned(self) -> float:
        """The most pinned host memory. Buffers have sizes of powers of two, and there are as many as were in use at the
        same time."""
        return 2 * self.host

    @property
    def of_communicators(self) -> int:
        return sum(one.nbytes for one in self.communicators)

    @property
    def outside_at_most(self) -> float:
        """Communicators and context, with as much more as was measured at most."""
        return measured_at_most(self.of_communicators + self.context)

    @property
    def total(self) -> float:
        """Without host memory."""
        return self.parameters + sum(self.allocated) + self.of_communicators + self.context


def device_memory(plan: Plan, rank: int, memory: RankMemory, outside: Outside | None) -> DeviceMemory:
    """``memory``: of ``rank`` along its program; ``outside``: None where there is no GPU."""
    spec = plan.spec
    context = 0.0
    made: Iterable[Communicators] = ()
    if outside is not None:
        made = outside.communicators(plan.placement, rank, spec.policy, spec.channels)
        context = outside.context
    at = max(range(len(memory.after)), key=memory.after.__getitem__)
    name = str(plan.timed(rank)[at])
    return DeviceMemory(memory.static, memory.parts, tuple(made), context, name, memory.host_peak)
