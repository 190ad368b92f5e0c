"""Compute orders, checked before anything is built on them: they may come from a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from megatron_pp.plan.instruction import BACKWARD, COMPUTE_OPS, FORWARD, WEIGHT, Instruction, instruction
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.spec import Plan, PlanError

_AFTER = {BACKWARD: FORWARD, WEIGHT: BACKWARD}


def check_orders(
    orders: Sequence[Sequence[Instruction]], placement: Placement, num_microbatches: int, forward_only: bool
) -> None:
    """Every rank runs F and then B of each (chunk, microbatch) once, and at most one W after it; where
    ``forward_only``, forwards alone will do. Raises PlanError with the rank, the operation, and what would be right.
    """
    if len(orders) != placement.pipeline_size:
        raise PlanError(f"there are orders of {len(orders)} ranks; the pipeline has {placement.pipeline_size}")
    trains = not forward_only or any(at.op != FORWARD for order in orders for at in order)
    for rank, order in enumerate(orders):
        _check_order(rank, order, placement.num_chunks, num_microbatches, trains)


def _check_order(rank: int, order: Sequence[Instruction], chunks: int, microbatches: int, trains: bool) -> None:
    seen: set[Instruction] = set()
    for at in order:
        if at.op not in COMPUTE_OPS:
            raise _error(rank, at, "an order holds compute alone: F, B and W")
        if not (0 <= at.chunk < chunks and 0 <= at.mb < microbatches):
            raise _error(rank, at, f"chunks are 0..{chunks - 1}, microbatches 0..{microbatches - 1}")
        if at in seen:
            raise _error(rank, at, "it stands twice in the order")
        before = _AFTER.get(at.op)
        if before is not None and (needed := instruction(before, at.chunk, at.mb)) not in seen:
            raise _error(rank, at, f"{needed} has to come before it")
        seen.add(at)
    for op in (FORWARD, BACKWARD) if trains else (FORWARD,):
        needed_cells = (instruction(op, chunk, mb) for chunk in range(chunks) for mb in range(microbatches))
        missing = next((at for at in needed_cells if at not in seen), None)
        if missing is not None:
            raise _error(rank, missing, "the order lacks it")


def check_programs(plan: Plan) -> None:
    """Raises PlanError where a program's compute is not the plan's order; a plan may come without orders."""
    if not plan.orders:
        return
    spec = plan.spec
    check_orders(plan.orders, plan.placement, spec.num_microbatches, spec.forward_only)
    for rank, (order, program) in enumerate(zip(plan.orders, plan.programs, strict=True)):
        wanted = [at for at in order if at.op == FORWARD or not spec.forward_only]
        found = [at for at in program if at.op in COMPUTE_OPS]
        if wanted != found:
            one, other = next((a, b) for a, b in zip_longest(wanted, found, fillvalue="nothing more") if a != b)
            raise PlanError(f"rank {rank}: the plan's order has {one} where its program runs {other}")


def _error(rank: int, at: Instruction, why: str) -> PlanError:
    return PlanError(f"rank {rank}: {at} ({at.name}): {why}")
