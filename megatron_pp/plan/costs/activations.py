"""Activation memory of a compute order.

A forward keeps what its backward needs. A split backward frees all but the inputs of linear layers and adds gradients
of their outputs; both stay until W: the *weight share* of a forward's memory. In a transformer layer with flash
attention and half-precision activations a forward keeps 34 s b h bytes (arXiv 2205.05198, section 4.1, without the
attention scores) and weight gradients need 32 s b h (arXiv 2401.10241, appendix): four inputs of 14 s b h, four output
gradients of 18 s b h. ``megatron_pp.measure_footprint`` measures a stage's own share.
"""

import math
from collections.abc import Iterator, Sequence

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import Instruction, unjoined
from megatron_pp.plan.ir.ledger import IN_FLIGHT, ON_HOST, WEIGHT_BACKLOG
from megatron_pp.plan.ir.spec import Plan

WEIGHT_SHARE = 32 / 34
"""The share of a forward's memory that a split backward keeps until its weight gradients."""

_Programs = Sequence[Sequence[Instruction]]
Shares = float | Sequence[float]  # one for all stages, or one per stage in model order


def kept_timeline(
    order: Sequence[Instruction], stages: Sequence[int], forward: Sequence[float], weight: Sequence[float]
) -> Iterator[float]:
    """Memory after each instruction of one rank's order or program, joined operations by themselves. ``stages`` are
    the rank's, by chunk; per stage of the model, a forward keeps ``forward`` until its backward and a split backward
    ``weight`` until its W, in any unit.
    """
    # Counts, so that sums of shares do not drift.
    in_flight = [0] * len(stages)
    waiting = [0] * len(stages)
    # Memory of each chunk, and of all.
    kept = [0.0] * len(stages)
    now = 0.0
    for at in unjoined(order):
        op = at.op
        if IN_FLIGHT[op] or WEIGHT_BACKLOG[op]:
            chunk = at.chunk
            stage = stages[chunk]
            in_flight[chunk] += IN_FLIGHT[op]
            waiting[chunk] += WEIGHT_BACKLOG[op]
            kept[chunk] = forward[stage] * in_flight[chunk] + weight[stage] * waiting[chunk]
            now = sum(kept)
        yield now


def host_timeline(order: Sequence[Instruction], stages: Sequence[int], forward: Sequence[float]) -> Iterator[float]:
    """Host memory of what is copied there, after each instruction; arguments and unit as of ``kept_timeline``."""
    now = 0.0
    for at in unjoined(order):
        now += ON_HOST[at.op] * forward[stages[at.chunk]]
        yield now


def activations_timeline(
    plan: Plan, rank: int, weight_share: Shares = WEIGHT_SHARE, run: Sequence[Instruction] | None = None
) -> Iterator[float]:
    """Memory after each instruction of ``rank``'s program, in units of one chunk's forward. Parts of a
    microbatch have equal shares, and count until their own backwards; an evaluation keeps nothing. ``run``: the program
    without communication, where known.

    Raises PlanError for shares that are not one number, or one per stage, of at least 0.
    """
    stages = plan.placement.num_stages
    parts = plan.spec.num_parts
    ones = (0.0 if plan.spec.forward_only else 1.0 / parts,) * stages
    late = [share / parts for share in _per_stage(weight_share, stages)]
    return kept_timeline(plan.programs[rank] if run is None else run, plan.placement.stages[rank], ones, late)


def peak_activations(
    plan: Plan, weight_share: Shares = WEIGHT_SHARE, programs: _Programs | None = None
) -> tuple[float, ...]:
    """The most that each rank keeps at the same time; ``programs``: every rank's ``run``, the rest as
    ``activations_timeline``.
    """
    lines = enumerate(programs or plan.programs)
    return tuple(max(activations_timeline(plan, rank, weight_share, run), default=0.0) for rank, run in lines)


def _per_stage(share: Shares, stages: int) -> tuple[float, ...]:
    shares = (share,) * stages if isinstance(share, (int, float)) else tuple(share)
    if len(shares) != stages:
        raise PlanError(f"weight shares are given for {len(shares)} stages; the plan has {stages}")
    for value in shares:
        if not 0 <= value < math.inf:
            raise PlanError(f"a weight share is {value}; it must be a finite number of at least 0, such as 0.94")
    return shares
