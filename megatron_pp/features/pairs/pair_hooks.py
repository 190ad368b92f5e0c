"""The hooks of pairs in making plans."""

from collections.abc import Mapping
from typing import Any

from megatron_pp.features.pairs.pair_instructions import paired
from megatron_pp.plan.hooks import Joins, PlanHooks
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec


class _Hooks(PlanHooks):
    def of_config(self, config: Any, placement: Placement, training: bool) -> Mapping[str, Any]:
        return {"overlap_pairs": training}

    def joins(self, spec: PlanSpec) -> Joins | None:
        return paired if spec.overlap_pairs else None


HOOKS = _Hooks()
