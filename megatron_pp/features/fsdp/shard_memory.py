"""Bytes of sharded stages along a rank's program."""

from collections.abc import Iterator, Sequence

from megatron_pp.features.fsdp.shard_lifetime import ShardWalk
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import refusal
from megatron_pp.plan.ir.spec import Plan


def whole_stages(plan: Plan, rank: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """After each instruction of ``plan.timed(rank)``: the stages whose parameters are whole or being gathered, and
    those whose gradients are whole, a stage once for each sum of gradients. Raises PlanError for a plan that ``verify``
    refuses.
    """
    walk = ShardWalk(plan, rank, lambda at, why: refusal(rank, at, why))
    parameters: list[tuple[int, ...]] = []
    gradients: list[tuple[int, ...]] = []
    whole: tuple[int, ...] = ()
    unreduced: tuple[int, ...] = ()
    for at in plan.timed(rank):
        for one in at.members or (at,):
            if one.op not in ins.STAGE_OPS | ins.SINGLE_COMPUTE_OPS:
                continue
            changes = walk.moved(one) if one.op in ins.STAGE_OPS else walk.computed(one)
            for kind, by in changes:
                if kind == "unsharded":
                    whole = _with(whole, one.stage, by)
                else:
                    unreduced = _with(unreduced, one.stage, by)
        parameters.append(whole)
        gradients.append(unreduced)
    return parameters, gradients


def _with(stages: tuple[int, ...], stage: int, by: int) -> tuple[int, ...]:
    if by > 0:
        return (*stages, stage)
    k = stages.index(stage)
    return stages[:k] + stages[k + 1 :]


def sharded_timeline(plan: Plan, rank: int, parameters: Sequence[float], gradients: Sequence[float]) -> Iterator[float]:
    """Bytes of whole parameters and gradients after each instruction of ``plan.timed(rank)``. ``parameters`` and
    ``gradients``: bytes of each stage's of the model.
    """
    for whole, unreduced in zip(*whole_stages(plan, rank), strict=True):
        yield sum(parameters[stage] for stage in whole) + sum(gradients[stage] for stage in unreduced)
