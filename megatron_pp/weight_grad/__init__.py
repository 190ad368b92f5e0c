"""Backward in two halves, for zero-bubble schedules: input gradients first (I), weight gradients later (W).

``split_weight_grad(model)`` converts a rank's model chunks once and returns the ``WeightGradStore`` that the engine
drives: deferred weight gradients wait in it per (chunk, microbatch), first in, first out. Outside of a pipeline step a
converted model behaves as before. Source: arXiv 2401.10241, section 2.
"""

from megatron_pp.errors import WeightGradError, WeightGradSplitError
from megatron_pp.weight_grad.convert import (
    check_sharding,
    check_wrappers,
    split_weight_grad,
    store_of,
    unsplit_weight_grad,
)
from megatron_pp.weight_grad.linear import fused_kernels
from megatron_pp.weight_grad.report import SplitReport, WholeLayer
from megatron_pp.weight_grad.store import WeightGradStore

__all__ = [
    "SplitReport", "WeightGradError", "WeightGradSplitError", "WeightGradStore", "WholeLayer", "check_sharding",
    "check_wrappers", "fused_kernels", "split_weight_grad", "store_of", "unsplit_weight_grad",
]  # fmt: skip
