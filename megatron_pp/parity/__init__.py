"""Does a parallel layout compute what one process does? The command `megatron-pp parity`, and `compare` for a model of
one's own, with assertions for its tests.
"""

import importlib
from typing import Any

__all__ = ["Pipeline", "assert_equal", "assert_within_rounding", "compare"]


def __getattr__(name: str) -> Any:
    """`compare` and what goes with it import torch; `cpu_stand_in` must come first where it is used."""
    if name in __all__:
        return getattr(importlib.import_module("megatron_pp.parity.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
