"""Checks data-parallel replicas of a pipeline against each other: collectives of each rank and its replicas must come
in one order, and must not form a circle with the messages of several pipelines.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import NONE, REPLICA_POSTS, Instruction
from megatron_pp.plan.ir.repeated import Line
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.verify.rendezvous import check_rendezvous


def check_replicas(plans: Sequence[Plan], device: Collection[str] = ()) -> None:
    """Raises PlanError if replicas that run ``plans``, one each, do not post the collectives of a rank in one order, or
    can hang. ``device``: as in ``check_rendezvous``, which each plan by itself has passed.
    """
    size = len(plans[0].programs)
    if any(len(plan.programs) != size for plan in plans):
        sizes = ", ".join(str(len(plan.programs)) for plan in plans)
        raise PlanError(f"the replicas' pipelines have {sizes} ranks; all have as many")
    for rank in range(size):
        _check_order(rank, [[at for at in plan.programs[rank] if at.op in REPLICA_POSTS] for plan in plans])
    programs = [_of_replica(program, replica * size) for replica, plan in enumerate(plans) for program in plan.programs]
    try:
        check_rendezvous(replace(plans[0], programs=tuple(programs)), device, replicas=len(plans))
    except PlanError as error:
        first = f"of {len(plans)} replicas, of which rank r of the second is rank {size} + r here"
        raise PlanError(f"{first}: {error}") from error


def _check_order(rank: int, lines: Sequence[Sequence[Instruction]]) -> None:
    longest = max(map(len, lines))
    for k in range(longest):
        found = [str(line[k]) if k < len(line) else "nothing more" for line in lines]
        if len(set(found)) > 1:
            raise PlanError(
                f"rank {rank}: collective {k} of its replicas is {' and '.join(dict.fromkeys(found))}: replicas post "
                "the collectives of a data-parallel group in one order"
            )


def _of_replica(program: Line, first: int) -> Line:
    """The program with its peers among ranks that are counted from ``first``."""
    if not first:
        return program
    return tuple(
        at._replace(peer=at.peer if at.peer == NONE else at.peer + first, members=_of_replica(at.members, first))
        for at in program
    )
