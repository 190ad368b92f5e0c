"""Counts the keys and values that attention keeps for later slices of a sequence, along a rank's program."""

from collections.abc import Iterator

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import Plan


def key_values_change(op: str, part: int, slices: int, forward_only: bool) -> int:
    """The change of the keys and values that a chunk keeps of a microbatch in ``slices``, by an operation of slice
    ``part``. The forward of the first slice allocates them for all slices. Its backward is the last to read them and
    frees them; in evaluation the forward of the last slice does."""
    allocated = op == ins.FORWARD and part == 0
    freed = part == slices - 1 and op == ins.FORWARD if forward_only else part == 0 and op in ins.BACKWARD_OPS
    return allocated - freed


def key_values_timeline(plan: Plan, rank: int) -> Iterator[float]:
    """The keys and values that attention keeps for later slices, and their gradients, right after each instruction of
    ``plan.timed(rank)``. 1 is the amount of a chunk and a whole microbatch.

    Gradients of all slices but the last are collected from the backward of the last slice to that of the first."""
    slices = plan.spec.slices
    forward_only = plan.spec.forward_only
    now = 0.0
    for at in plan.timed(rank):
        if at.part >= 0 and at.op in ins.SINGLE_COMPUTE_OPS:
            now += key_values_change(at.op, at.part, slices, forward_only)
            if at.op in ins.BACKWARD_OPS and at.part in (0, slices - 1):
                now += (slices - 1) / slices * (-1 if at.part == 0 else 1)
        yield now
