"""What a memory limit adds to a step's lower bound: forwards that wait for backwards, and microbatches that have a rank
for themselves.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import MemoryModel
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders.list_scheduler import ROUNDING
from megatron_pp.planner.bound_paths import StageTimes, Wait


def waits_of(placement: Placement, memory: MemoryModel, times: StageTimes) -> tuple[Wait, ...]:
    """What forwards of each stage wait for. Raises PlanError where one microbatch alone exceeds the limit.

    Of n microbatches between their forward of a stage and their backward of ``until``, a stage of the same rank, each
    keeps the chunks up to the earlier of the two. One keeps more: where ``until`` is the later one, the first to run
    that backward has all chunks up to there, else the last one has those up to ``stage`` when its forward starts. So it
    has where the end of W is waited for, and each of the others may have no more than what waits for W.
    """
    waits: list[Wait] = []
    for rank, stages in enumerate(placement.stages):
        limit, kept = memory.limits[rank] * (1 + ROUNDING), list(accumulate(memory.forward[s] for s in stages))
        if kept[-1] > limit:
            raise PlanError(
                f"one microbatch alone needs {kept[-1]:g} of memory on rank {rank}, where the limit is "
                f"{memory.limits[rank]:g}"
            )
        if limit == math.inf:
            continue
        for stage, own in zip(stages, kept, strict=True):
            for until, whole in zip(stages, kept, strict=True):
                least = min(own, whole)  # of each of the others until that backward
                if not least:
                    continue
                most = int((limit - whole) / own) if until >= stage else int((limit - own) / least)
                waits.append(Wait(stage, 1 + most, until, times.backward[until], False))
                least = min(least, memory.weight[until])
                if least:
                    time = times.backward[until] + times.rest[until]
                    waits.append(Wait(stage, 1 + int((limit - own) / least), until, time, True))
    return tuple(waits)


def alone_from(stages: Sequence[int], memory: MemoryModel, limit: float) -> int | None:
    """The first of a rank's chunks from whose forward until the last chunk's backward the rank can keep nothing else,
    not even what waits for a W; None where there is none.
    """
    kept = list(accumulate(memory.forward[s] for s in stages))
    left = limit * (1 + ROUNDING) - min(kept[0], *(memory.weight[s] for s in stages))
    return next((chunk for chunk, own in enumerate(kept) if own > left), None)
