"""How much of a sweep runs."""

from __future__ import annotations

import os

EXHAUSTIVE = os.environ.get("MEGATRON_PP_EXHAUSTIVE", "") == "1"
"""Whether sweeps run whole, for hours, and not the parts that cover every pair of choices."""
