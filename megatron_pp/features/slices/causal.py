"""The causal order of the slices of a sequence."""

from megatron_pp.plan.ir.dataflow import RESULT_OF, TOWARDS
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, NONE, WEIGHT_GRAD

CAUSAL = {
    FORWARD: "attention reads the keys and values of the slices before its own",
    BACKWARD: "keys and values get gradients from the slices behind their own",
}
"""Op -> the reason why its results of one stage and microbatch come in the order of slices."""


def slice_before(op: str, part: int, slices: int) -> int | None:
    """The slice of the same stage and microbatch whose forward (or backward) comes right before that of slice ``part``;
    None if there is none. Causal attention reads the keys and values of all earlier slices and gives them gradients. So
    forwards run from the first slice to the last, backwards from the last to the first (arXiv 2406.03488).
    """
    if op == WEIGHT_GRAD or part == NONE:
        return None
    before = part - TOWARDS[RESULT_OF[op]]
    return before if 0 <= before < slices else None
