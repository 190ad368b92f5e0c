"""Checks that a gradient is used before CUDA graphs reuse its buffer."""

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FREE_B, SINGLE_COMPUTE_OPS, Instruction, each
from megatron_pp.plan.ir.repeated import Block, RepetitionError
from megatron_pp.plan.ir.spec import STATIC_BUFFERS, Plan

_Cell = tuple[int, int, int]  # stage, microbatch, slice


def check_static_buffers(plan: Plan, block: Block | None = None) -> None:
    """Raises PlanError, which names rank, operation and gradient, unless every input gradient is read (sent, or used by
    the stage before on the same rank) before the operation after the next backward. Transformer Engine gives the buffer
    to the graphs that were captured after that backward (``_reuse_graph_input_output_buffers``), and autograd passes it
    on without a copy.

    With ``block``, raises RepetitionError unless the gradients are in the same state before and after the block.
    """
    for rank in range(len(plan.programs)):
        _check_rank(plan, rank, block)


def _check_rank(plan: Plan, rank: int, block: Block | None) -> None:
    newest: dict[_Cell, Instruction] = {}  # gradient of the last backward that is not read yet -> that backward
    exposed: dict[_Cell, Instruction] = {}  # the same of earlier backwards: the next operation may overwrite these
    ends = {} if block is None else dict(zip(block.of(rank), (0, block.microbatches), strict=True))
    states = []
    for position, at in enumerate(plan.programs[rank]):
        if position in ends:
            states.append([{(s, mb - ends[position], part) for s, mb, part in cells} for cells in (newest, exposed)])
        for one in each([at]):  # a pair's forward runs before its backward reads
            backward = one.op in BACKWARD_OPS
            if backward or one.op == FREE_B:  # a backward reads its gradient before its graph overwrites any
                read = one.stage + backward, one.mb, one.part
                newest.pop(read, None)
                exposed.pop(read, None)
            if one.op not in SINGLE_COMPUTE_OPS:
                continue
            if exposed:
                raise _overwritten(plan, rank, one, next(iter(exposed.values())))
            if backward:
                exposed = newest
                newest = {(one.stage, one.mb, one.part): one} if one.stage > 0 else {}
    if block is not None and states[0] != states[1]:
        raise RepetitionError(f"rank {rank}: input gradients differ between both ends of the block")


def _overwritten(plan: Plan, rank: int, at: Instruction, made: Instruction) -> PlanError:
    state = "is still being sent" if plan.placement.crosses_ranks(made.stage - 1) else "is not used yet"
    return PlanError(
        f"rank {rank}: {at} ({at.name}) may overwrite the input gradient of {made}, which {state}: under "
        f"{STATIC_BUFFERS} its buffer is reused after the next backward"
    )
