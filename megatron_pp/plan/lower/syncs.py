"""Places the calls of Megatron's data-parallel hooks: parameter and gradient syncs.

Collectives slow compute down, so Megatron starts them in the same slot on every pipeline rank. Rank r is r slots behind
rank 0 in the forward direction and r slots ahead in the backward one (Megatron's interleaved schedule; apex#1611).
"""

from collections import defaultdict
from collections.abc import Sequence

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import NONE, Instruction, numbered
from megatron_pp.plan.ir.spec import HOOKS, Plan, PlanSpec

_BACKWARDS = ins.BACKWARD_OPS | ins.LAST_PASS | {ins.WEIGHT_GRAD}

Syncs = dict[int, list[Instruction]]  # index of an entry of a compute order -> syncs next to it


def syncs_of(spec: PlanSpec, rank: int, order: Sequence[Instruction]) -> tuple[Syncs, Syncs]:
    """(before, after): the syncs right before and right after each entry of ``rank``'s placed order, by its index."""
    before: Syncs = defaultdict(list)
    after: Syncs = defaultdict(list)
    if spec.param_sync:
        _param_syncs(spec, rank, order, before)
    if not spec.forward_only:
        _grad_syncs(spec, rank, order, before, after)
    return before, after


def _param_syncs(spec: PlanSpec, rank: int, order: Sequence[Instruction], before: Syncs) -> None:
    """Syncs of chunks 0 and 1 come first; that of chunk c + 1 when the first microbatch of chunk c is due on rank 0. If
    a rank has one chunk there are none: as in Megatron the wrapper's own pre-forward hooks do it.
    """
    if spec.num_chunks == 1:
        return
    forwards = [(i, at) for i, at in numbered(order) if at.op == ins.FORWARD]
    first = {at.chunk: k for k, (_, at) in reversed(list(enumerate(forwards))) if at.mb == 0}
    stages = {at.chunk: at.stage for _, at in forwards}
    for chunk in range(spec.num_chunks):
        entry = 0 if chunk < 2 else forwards[max(0, first[chunk - 1] - rank)][0]
        before[entry].append(_sync(ins.PARAM_SYNC, chunk, stages))


def _grad_syncs(spec: PlanSpec, rank: int, order: Sequence[Instruction], before: Syncs, after: Syncs) -> None:
    singles = list(numbered(order))
    stages = {at.chunk: at.stage for _, at in singles}
    completing = [(i, at) for i, at in singles if at.op in ins.GRADIENT_OPS]
    last = {at.chunk: k for k, (_, at) in enumerate(completing)}  # chunk -> ordinal of the operation that completes it
    # As in Megatron: without chunks the first rank of a pipeline has no bubble after its last backward that could hide
    # an explicit sync.
    if spec.grad_sync == HOOKS or (spec.num_chunks == 1 and rank == 0):
        # Layers that do not split their backward complete their gradients in the last I or B, others in the last W.
        # Gradients of a layer that all ranks share are complete in the last pass.
        last_backward = {at.chunk: i for i, at in singles if at.op in ins.BACKWARD_OPS}
        last_pass = {at.chunk: i for i, at in singles if at.op in ins.LAST_PASS}
        alone = spec.pipeline_size == 1 and spec.num_chunks == 1
        for chunk, k in last.items():
            for entry in sorted({completing[k][0], last_backward[chunk], last_pass.get(chunk, completing[k][0])}):
                # Without a pipeline it comes before the forward, for wrappers that prepare in forward.
                early = alone and entry > 0 and order[entry - 1].op == ins.FORWARD
                before[entry - early].append(_sync(ins.ENABLE_GRAD_SYNC, chunk, stages))
        return
    for chunk, k in sorted(last.items()):
        late = k + rank >= len(completing) or (spec.num_chunks == 1 and rank > 0)
        entry = len(order) - 1 if late else completing[k + rank][0]
        after[entry].append(_sync(ins.GRAD_SYNC, chunk, stages))


def _sync(op: str, chunk: int, stages: dict[int, int]) -> Instruction:
    return Instruction(op, stages.get(chunk, NONE), chunk=chunk)


def prepares_in_forward(plan: Plan, rank: int) -> bool:
    """Whether wrappers that prepare a reduction in forward may do so. They may without a pipeline, if the sync is
    enabled before the last forward.
    """
    if plan.spec.pipeline_size > 1 or plan.spec.num_chunks > 1:
        return False
    following = None
    for at in reversed(plan.programs[rank]):
        if at.op in ins.COMPUTE_OPS:
            following = ins.operations(at)[0].op
        elif at.op == ins.ENABLE_GRAD_SYNC and following != ins.WEIGHT_GRAD:
            return following == ins.FORWARD
    return True


def last_reentry(plan: Plan, rank: int) -> int:
    """The position in ``rank``'s program behind which no_sync is not entered again. It is that of the last gradients,
    or the program's end under Megatron's interleaved schedule, which enters no_sync after every backward.
    """
    program, spec = plan.programs[rank], plan.spec
    if spec.num_chunks > 1 and (spec.grad_sync == HOOKS or rank == 0):
        return len(program)
    entries = () if spec.forward_only else range(len(program) - 1, -1, -1)
    return next((k for k in entries if any(at.op in _BACKWARDS for at in ins.each([program[k]]))), 0)
