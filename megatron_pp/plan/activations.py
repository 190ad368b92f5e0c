"""Activation memory of a compute order: what autograd keeps between a forward and its backward, and what a split
backward leaves until its weight gradients.

A forward keeps what its backward needs. A split backward frees it, but for the inputs of linear layers, and adds
gradients of their outputs; both stay until W. That is the *weight share* of a forward's memory. In a transformer layer
with flash attention and half-precision activations a forward keeps 34 s b h bytes (arXiv 2205.05198, section 4.1,
without the attention scores) and weight gradients need 32 s b h (arXiv 2401.10241, appendix): four inputs of 14 s b h,
four output gradients of 18 s b h. ``megatron_pp.measure_footprint`` measures a stage's own share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs import WEIGHT_SHARE
from megatron_pp.plan.instruction import (
    COMPUTE_OPS,
    FORWARD,
    INPUT_GRAD,
    SINGLE_COMPUTE_OPS,
    WEIGHT_GRAD,
    Instruction,
    without_pairs,
)
from megatron_pp.plan.spec import Plan

Shares = float | Sequence[float]  # one for all stages, or one per stage in model order


def kept_timeline(
    order: Sequence[Instruction], stages: Sequence[int], forward: Sequence[float], weight: Sequence[float]
) -> Iterator[float]:
    """Memory right after each instruction of one rank's order or program, the halves of a PAIR by themselves.

    ``stages`` are the rank's, in chunk order; per stage of the model, ``forward`` is what a forward keeps until its
    backward and ``weight`` what a split backward keeps until its W, in any unit.
    """
    in_flight, waiting = [0] * len(stages), [0] * len(stages)  # counts, so that sums of shares do not drift
    kept, now = [0.0] * len(stages), 0.0  # of each chunk, and of all
    for at in without_pairs(order):
        if at.op in SINGLE_COMPUTE_OPS:
            chunk = at.chunk
            if at.op == WEIGHT_GRAD:
                waiting[chunk] -= 1
            else:
                in_flight[chunk] += 1 if at.op == FORWARD else -1
                waiting[chunk] += at.op == INPUT_GRAD
            stage = stages[chunk]
            kept[chunk] = forward[stage] * in_flight[chunk] + weight[stage] * waiting[chunk]
            now = sum(kept)
        yield now


def activations_timeline(plan: Plan, rank: int, weight_share: Shares = WEIGHT_SHARE) -> Iterator[float]:
    """Memory right after each instruction of ``rank``'s program, where each chunk's forward counts 1; an evaluation
    keeps nothing.

    Raises PlanError for shares that are not one number, or one per stage, of at least 0.
    """
    return _timeline(plan, rank, plan.programs[rank], weight_share)


def peak_activations(plan: Plan, weight_share: Shares = WEIGHT_SHARE) -> tuple[float, ...]:
    """The most that each rank keeps at once, in units of one chunk's forward. Raises PlanError, see
    activations_timeline.
    """
    compute = ([at for at in program if at.op in COMPUTE_OPS] for program in plan.programs)
    return tuple(max(_timeline(plan, rank, run, weight_share), default=0.0) for rank, run in enumerate(compute))


def _timeline(plan: Plan, rank: int, run: Sequence[Instruction], weight_share: Shares) -> Iterator[float]:
    stages = plan.placement.num_stages
    ones = (0.0 if plan.spec.forward_only else 1.0,) * stages
    return kept_timeline(run, plan.placement.stages[rank], ones, _per_stage(weight_share, stages))


def _per_stage(share: Shares, stages: int) -> tuple[float, ...]:
    shares = (share,) * stages if isinstance(share, (int, float)) else tuple(share)
    if len(shares) != stages:
        raise PlanError(f"weight shares are given for {len(shares)} stages; the plan has {stages}")
    for value in shares:
        if not 0 <= value < math.inf:
            raise PlanError(f"a weight share is {value}; it must be a finite number of at least 0, such as 0.94")
    return shares
