"""Does a parallel layout compute what one process does? The public names of ``tools/parity``, for tests of a model."""

from megatron_pp.tools.parity.models import Pipeline, assert_equal, assert_within_rounding, compare

__all__ = ["Pipeline", "assert_equal", "assert_within_rounding", "compare"]
