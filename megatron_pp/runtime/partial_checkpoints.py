"""Which microbatches recompute all their layers, if the config says how many recompute only some."""

from collections.abc import Sequence

from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, Instruction, unjoined


def checkpoint_flags(partial: int, order: Sequence[Instruction], forward_only: bool) -> dict[tuple[int, int], bool]:
    """For each (chunk, microbatch), whether Megatron checkpoints all its layers. A window is as long as a rank's
    in-flight microbatches, and the first ``partial`` microbatches of each window checkpoint only some layers (arXiv
    2205.05198, appendix C). ``order`` is that of training. Evaluation with chunks is one window, as in Megatron."""
    singles = list(unjoined(order))
    forwards = [at for at in singles if at.op == FORWARD]
    window = next((i for i, at in enumerate(singles) if at.op in BACKWARD_OPS), len(singles))
    if forward_only and any(op.chunk > 0 for op in forwards):
        window = len(forwards)
    return {(op.chunk, op.mb): k % window >= partial for k, op in enumerate(forwards)}
