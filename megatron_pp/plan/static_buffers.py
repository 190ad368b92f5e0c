"""The rule of layers in CUDA graphs: the buffer of an input gradient is reused after the next backward.

Transformer Engine gives the buffer to the graphs that were captured after that backward
(``_reuse_graph_input_output_buffers``), and autograd hands it out as it is. So whoever reads the gradient, its send or
the backward of the stage before on the same rank, must do so before the operation after the next backward.
"""

from __future__ import annotations

from megatron_pp.errors import PlanError
from megatron_pp.plan.instruction import BACKWARD_OPS, COMPUTE_OPS, FREE_B, Instruction
from megatron_pp.plan.repeated import Block, RepetitionError
from megatron_pp.plan.spec import STATIC_BUFFERS, Plan

_Cell = tuple[int, int, int]  # stage, microbatch, slice


def check_static_buffers(plan: Plan, block: Block | None = None) -> None:
    """Raises PlanError where an operation may overwrite an input gradient that is still being sent, or not used yet,
    naming rank, operation and gradient. With ``block``, raises RepetitionError unless the block leaves the same
    gradients that it found.
    """
    for rank in range(len(plan.programs)):
        _check_rank(plan, rank, block)


def _check_rank(plan: Plan, rank: int, block: Block | None) -> None:
    newest: dict[_Cell, Instruction] = {}  # gradients of the last backward that are not settled, and that backward
    exposed: dict[_Cell, Instruction] = {}  # of backwards before it: the next operation may overwrite them
    ends = {} if block is None else dict(zip(block.of(rank), (0, block.microbatches), strict=True))
    states = []
    for position, at in enumerate(plan.programs[rank]):
        if position in ends:
            states.append([{(s, mb - ends[position], part) for s, mb, part in cells} for cells in (newest, exposed)])
        if at.op == FREE_B:
            read = at.stage, at.mb, at.slice
            newest.pop(read, None), exposed.pop(read, None)
        if at.op not in COMPUTE_OPS:
            continue
        backwards = [one for one in at.members or (at,) if one.op in BACKWARD_OPS]
        for one in backwards:  # it copies the gradient that it uses before it overwrites anything
            read = one.stage + 1, one.mb, one.slice
            newest.pop(read, None), exposed.pop(read, None)
        if exposed:
            made = next(iter(exposed.values()))
            sent = plan.placement.crosses_ranks(made.stage - 1)
            raise PlanError(
                f"rank {rank}: {at} ({at.name}) may overwrite the input gradient of {made}, which "
                f"{'is still being sent' if sent else 'is not used yet'}: under {STATIC_BUFFERS} its buffer is reused "
                "after the next backward"
            )
        if backwards:
            exposed, newest = newest, {(one.stage, one.mb, one.slice): one for one in backwards if one.stage > 0}
    if block is not None and states[0] != states[1]:
        raise RepetitionError(f"rank {rank}: input gradients differ between both ends of the block")
