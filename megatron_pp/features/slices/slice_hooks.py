"""Where slices of a sequence take part in making and verifying plans: a slice is a part of a microbatch, backwards are
in causal order, as forwards are, and keys and values are counted.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_pp.errors import PlanError, ScheduleError
from megatron_pp.features.slices.causal import CAUSAL, slice_before
from megatron_pp.features.slices.key_values import key_values_change, key_values_timeline
from megatron_pp.plan.hooks import Change, FeatureBytes, Follower, PlanHooks
from megatron_pp.plan.ir.dataflow import RESULT_OF
from megatron_pp.plan.ir.instruction import BACKWARD, BACKWARD_OPS, Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.rules import B_RAN
from megatron_pp.plan.ir.spec import Plan, PlanSpec, check_whole
from megatron_pp.plan.ir.tasks import Cell
from megatron_pp.plan.orders import SCHEDULES, find_family
from megatron_pp.plan.orders.family import Family


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
            before = slice_before(at.op, at.part, self.slices)
            if before is not None and not self.facts[(at.stage, at.mb, before)] & B_RAN:
                raise self.error(at, f"it comes before {at._replace(part=before)}: {CAUSAL[BACKWARD]}")
        return [("key_values", key_values_change(at.op, at.part, self.slices, self.forward_only))]

    def state(self, since: int) -> Any:
        """Facts are those of the rank's cells, and counts those of its memory."""
        return None

    def check_end(self, where: Callable[[Cell], str]) -> None:
        """Each cell's own check is enough."""


def check_sliced(family: Family, slices: int) -> None:
    """Raises PlanError where ``family`` has no orders of that many slices of a sequence."""
    if slices > 1 and not family.sliced:
        names = ", ".join(name for name, other in SCHEDULES.items() if other.sliced)
        raise PlanError(f"schedule {family.name} runs sequences whole, not in {slices} slices; {names} have slices")


class _Hooks(PlanHooks):
    part_word = "slice"

    def parts(self, spec: PlanSpec) -> int:
        check_whole("number of slices", spec.slices, 1)
        return spec.slices

    def check_family(self, spec: PlanSpec, family: Family) -> None:
        check_sliced(family, spec.slices)

    def schedule(self, num_chunks: int) -> str:
        return "interleaved_seq_1f1b" if num_chunks > 1 else "seq_1f1b"

    def of_config(self, config: Any, placement: Placement, training: bool) -> Mapping[str, Any]:
        family = find_family(config.pipeline_schedule or self.schedule(placement.num_chunks))
        try:
            check_sliced(family, config.sequence_slices)
        except PlanError as error:
            raise ScheduleError(f"sequence_slices: {error}") from error
        return {"slices": config.sequence_slices}

    def comes_behind(self, spec: PlanSpec, at: Instruction) -> tuple[Instruction, str] | None:
        before = slice_before(at.op, at.part, spec.slices)
        return None if before is None else (at._replace(part=before), CAUSAL[RESULT_OF[at.op]])

    def bytes_of(self, plan: Plan, rank: int, shape: Any) -> FeatureBytes:
        """The keys and values that are kept for later slices. The forward of the first slice allocates them for all."""
        if plan.spec.slices == 1:
            return FeatureBytes()
        nbytes = shape.layers_per_stage(plan.placement.num_stages) * shape.layer_key_value_bytes
        kept = (microbatches * nbytes for microbatches in key_values_timeline(plan, rank))
        return FeatureBytes(apart=nbytes if shape.keeps_layers else 0.0, kept=kept)

    def follower(
        self, plan: Plan, rank: int, facts: Mapping[Cell, int], error: Callable[..., PlanError]
    ) -> SliceWalk | None:
        return SliceWalk(plan, facts, error) if plan.spec.slices > 1 else None


HOOKS = _Hooks()
