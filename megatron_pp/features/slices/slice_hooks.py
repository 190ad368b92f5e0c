"""Where slices of a sequence take part in verifying plans: backwards are in causal order, as forwards are, and keys and
values are counted.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.features.slices.key_values import key_values_change
from megatron_pp.plan.hooks import Change, Follower, PlanHooks
from megatron_pp.plan.ir.dataflow import CAUSAL, slice_before
from megatron_pp.plan.ir.instruction import BACKWARD, BACKWARD_OPS, Instruction
from megatron_pp.plan.ir.rules import B_RAN
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.ir.tasks import Cell


class SliceWalk(Follower):
    """Follows the slices of one rank."""

    takes = frozenset[str]()

    def __init__(self, plan: Plan, facts: Mapping[Cell, int], error: Callable[..., PlanError]) -> None:
        self.slices = plan.spec.slices
        self.forward_only = plan.spec.forward_only
        self.facts = facts
        self.error = error

    def moved(self, at: Instruction) -> list[Change]:
        """Slices have no instructions of their own."""
        return []

    def computed(self, at: Instruction) -> list[Change]:
        if at.op in BACKWARD_OPS:
            before = slice_before(at.op, at.slice, self.slices)
            if before is not None and not self.facts[(at.stage, at.mb, before)] & B_RAN:
                raise self.error(at, f"it comes before {at._replace(slice=before)}: {CAUSAL[BACKWARD]}")
        return [("key_values", key_values_change(at.op, at.slice, self.slices, self.forward_only))]

    def state(self, since: int) -> Any:
        """Facts are those of the rank's cells, and counts those of its memory."""
        return None

    def check_end(self, where: Callable[[Cell], str]) -> None:
        """Each cell's own check is enough."""


class _Hooks(PlanHooks):
    def follower(
        self, plan: Plan, rank: int, facts: Mapping[Cell, int], error: Callable[..., PlanError]
    ) -> SliceWalk | None:
        return SliceWalk(plan, facts, error) if plan.spec.slices > 1 else None


HOOKS = _Hooks()
