"""Rules that find what would end a job at its start or in its first step. Each file has the rules of one subject."""

from __future__ import annotations

from megatron_pp.tools.check.rules.batches import BATCHES
from megatron_pp.tools.check.rules.features import FEATURES
from megatron_pp.tools.check.rules.placing import PLACING
from megatron_pp.tools.check.rules.rule import Rule
from megatron_pp.tools.check.rules.sizes import SIZES

RULES: tuple[Rule, ...] = (*PLACING, *BATCHES, *SIZES, *FEATURES)
"""All rules, in the order of an answer."""
