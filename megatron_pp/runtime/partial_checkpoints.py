"""Which microbatches recompute all their layers, where the config says how many do so in part."""

from collections.abc import Sequence

from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, Instruction, unjoined


def checkpoint_flags(partial: int, order: Sequence[Instruction], forward_only: bool) -> dict[tuple[int, int], bool]:
    """Per (chunk, microbatch), whether Megatron checkpoints all its layers. Of each window as long as a rank's
    in-flight microbatches, the first ``partial`` checkpoint in part only (arXiv 2205.05198, appendix C). ``order`` is
    that of training; evaluation with chunks counts, as in Megatron, as one window."""
    singles = list(unjoined(order))
    forwards = [at for at in singles if at.op == FORWARD]
    window = next((i for i, at in enumerate(singles) if at.op in BACKWARD_OPS), len(singles))
    if forward_only and any(op.chunk > 0 for op in forwards):
        window = len(forwards)
    return {(op.chunk, op.mb): k % window >= partial for k, op in enumerate(forwards)}
