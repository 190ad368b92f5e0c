"""Tests whether a parallel layout of a model computes the same as one process: the public names of ``tools/parity``."""

from megatron_pp.tools.parity.models import Pipeline, assert_equal, assert_within_rounding, compare

__all__ = ["Pipeline", "assert_equal", "assert_within_rounding", "compare"]
