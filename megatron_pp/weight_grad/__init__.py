"""Backward in two halves, for zero-bubble schedules: input gradients first (I), weight gradients later (W).

``split_weight_grad(model)`` converts a rank's model chunks once and returns the ``WeightGradStore`` that the engine
drives: deferred weight gradients wait in it per (chunk, microbatch), first in, first out. Outside of a pipeline step a
converted model behaves as before. Source: arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from megatron_pp.weight_grad.convert import (
    WeightGradSplitError,
    check_wrappers,
    split_weight_grad,
    store_of,
    unsplit_weight_grad,
)
from megatron_pp.weight_grad.footprint import Footprint, measure_footprint
from megatron_pp.weight_grad.fused import fused_kernels
from megatron_pp.weight_grad.store import SplitReport, WeightGradError, WeightGradStore

__all__ = [
    "Footprint",
    "SplitReport",
    "WeightGradError",
    "WeightGradSplitError",
    "WeightGradStore",
    "check_wrappers",
    "fused_kernels",
    "measure_footprint",
    "split_weight_grad",
    "store_of",
    "unsplit_weight_grad",
]
