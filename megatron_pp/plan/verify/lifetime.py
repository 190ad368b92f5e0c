"""The half of ``verify`` that looks at one rank at a time: the rules of ``rules.py``, syncs, and memory."""

from collections.abc import Iterator, Sequence
from itertools import islice

from megatron_pp.errors import InstructionError, PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.ledger import Memory
from megatron_pp.plan.ir.repeated import Block, RepetitionError
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.verify.lifetime_walk import RankPeaks, Walk
from megatron_pp.plan.verify.sync_check import check_syncs


def check_rank(plan: Plan, rank: int, deallocate: bool = True, block: Block | None = None) -> RankPeaks:
    """Check ``rank``'s program; returns the peaks of its memory. Raises PlanError naming the rank, the instruction and
    what is missing.

    ``deallocate`` says whether FREE_F gives the output's data back (config.deallocate_pipeline_outputs) or it
    stays until the backward. With ``block``, raises RepetitionError unless the block leaves the rank as it found it.
    """
    peaks = _walked(Walk(plan, rank, deallocate), plan, block)
    _check_groups(plan, rank)
    check_syncs(plan, rank)
    return peaks


def tensors_timeline(plan: Plan, rank: int, deallocate: bool = True) -> Iterator[int]:
    """Pipeline tensors alive together right after each instruction of ``plan.timed(rank)``. Raises PlanError as
    check_rank does.
    """
    return Walk(plan, rank, deallocate).tensors()


def _walked(walk: Walk, plan: Plan, block: Block | None) -> RankPeaks:
    """What ``check_rank`` returns, found instruction by instruction."""
    rank, timeline, together = walk.rank, walk.tensors(), 0
    if block is not None:
        program, (start, end) = plan.programs[rank], block.of(rank)
        if any(at.op in ins.SYNC_OPS for at in program[start:end]):
            raise RepetitionError(f"rank {rank}: a sync stands in the block")
        together = max(islice(timeline, _timed_length(program[:start])), default=0)
        before = walk.state(0)
        together = max(together, max(islice(timeline, _timed_length(program[start:end])), default=0))
        if walk.state(block.microbatches) != before:
            raise RepetitionError(f"rank {rank}: tensors or microbatches differ between both ends of the block")
    together = max(together, max(timeline, default=0))
    return RankPeaks(Memory(*walk.peaks), together)


def _check_groups(plan: Plan, rank: int) -> None:
    """Members of a pair that are in their order one by one may still not belong there."""
    for at in plan.programs[rank]:
        if at.members and at.op not in ins.GROUP_OPS:
            raise PlanError(f"rank {rank}: {at.op} has members, {list(at.members)}: only batches and pairs do")
        if at.op == ins.PAIR:
            try:
                ins.pair(*at.members)
            except InstructionError as error:
                raise PlanError(
                    f"rank {rank}: {error}: what needs the pair's last weight gradient, or a tensor of another "
                    "operation, stands after or before it"
                ) from error


def _timed_length(program: Sequence[Instruction]) -> int:
    """Its length as ``Plan.timed`` counts, with the members of a pair by themselves."""
    return len(program) + sum(len(at.members) - 1 for at in program if at.op == ins.PAIR)
