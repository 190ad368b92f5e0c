"""Where Megatron's data-parallel hooks fire: parameter and gradient synchronisation, staggered so that all ranks
start them together.

Collectives slow compute down, so Megatron starts them in the same slot on every pipeline rank: rank r is r slots
behind rank 0 in the forward direction and ahead in the backward one (Megatron's interleaved schedule; apex#1611).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_pp.plan.instruction import (
    BACKWARD,
    COMPUTE_OPS,
    FORWARD,
    GRAD_ENABLE,
    GRAD_SYNC,
    PARAM_SYNC,
    WEIGHT,
    Instruction,
    instruction,
)
from megatron_pp.plan.spec import HOOKS, Plan, PlanSpec

Marks = dict[int, list[Instruction]]  # index of a compute operation -> marks next to it


def marks_of(spec: PlanSpec, rank: int, order: Sequence[Instruction]) -> tuple[Marks, Marks]:
    """(before, after): marks to run right before and right after the compute operation of that index."""
    before: Marks = defaultdict(list)
    after: Marks = defaultdict(list)
    if spec.param_sync:
        _param_syncs(spec, rank, order, before)
    if not spec.forward_only:
        _grad_syncs(spec, rank, order, before, after)
    return before, after


def _param_syncs(spec: PlanSpec, rank: int, order: Sequence[Instruction], before: Marks) -> None:
    """Chunks 0 and 1 up front; chunk c + 1 when the first microbatch of chunk c is due on rank 0. One chunk alone is
    left to the wrapper's own pre-forward hooks, as in Megatron."""
    if spec.num_chunks == 1:
        return
    forwards = [i for i, op in enumerate(order) if op.op == FORWARD]
    first = {order[i].chunk: k for k, i in reversed(list(enumerate(forwards))) if order[i].mb == 0}
    before[0] += (instruction(PARAM_SYNC, 0), instruction(PARAM_SYNC, 1))
    for chunk in range(2, spec.num_chunks):
        before[forwards[max(0, first[chunk - 1] - rank)]].append(instruction(PARAM_SYNC, chunk))


def _grad_syncs(spec: PlanSpec, rank: int, order: Sequence[Instruction], before: Marks, after: Marks) -> None:
    split = {(op.chunk, op.mb) for op in order if op.op == WEIGHT}
    completing = [
        i for i, op in enumerate(order) if op.op == WEIGHT or (op.op == BACKWARD and (op.chunk, op.mb) not in split)
    ]
    # chunk -> ordinal of its last gradient-completing operation
    last = {order[i].chunk: k for k, i in enumerate(completing)}
    # Megatron: the first rank of a pipeline without chunks has no bubble after its last backward to hide an explicit
    # sync in.
    if spec.grad_sync == HOOKS or (spec.num_chunks == 1 and rank == 0):
        for chunk, k in last.items():
            for at in sorted({completing[k], _last_backward(order, chunk)}):
                before[_enable_at(spec, order, at)].append(instruction(GRAD_ENABLE, chunk))
        return
    for chunk, k in sorted(last.items()):
        late = k + rank >= len(completing) or (spec.num_chunks == 1 and rank > 0)
        at = len(order) - 1 if late else completing[k + rank]
        after[at].append(instruction(GRAD_SYNC, chunk))


def _last_backward(order: Sequence[Instruction], chunk: int) -> int:
    """Where the last backward of ``chunk`` stands. It completes the gradients of layers that do all of theirs in B,
    its last WEIGHT those of the others.
    """
    return max(i for i, op in enumerate(order) if op.op == BACKWARD and op.chunk == chunk)


def _enable_at(spec: PlanSpec, order: Sequence[Instruction], completing: int) -> int:
    """Right before the completing operation; without a pipeline before the forward of the last backward, where it
    stands right before that, so that wrappers which prepare in forward see it (``prepares_in_forward``).
    """
    alone = spec.pipeline_size == 1 and spec.num_chunks == 1
    if alone and completing > 0 and order[completing - 1].op == FORWARD:
        return completing - 1
    return completing


def prepares_in_forward(plan: Plan, rank: int) -> bool:
    """Whether wrappers that prepare for a reduction in forward do so in the right one: without a pipeline, where the
    sync is enabled before the last forward.
    """
    if plan.spec.pipeline_size > 1 or plan.spec.num_chunks > 1:
        return False
    following = None
    for at in reversed(plan.programs[rank]):
        if at.op in COMPUTE_OPS:
            following = at.op
        elif at.op == GRAD_ENABLE and following != WEIGHT:
            return following == FORWARD
    return True
