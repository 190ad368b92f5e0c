"""A user's own schedule from a file, whose path is given in place of a schedule's name. ``serialize.py`` reads it.

The file's compute order is used, and lowering adds communication as the run's config says. If the file holds a whole
plan that was lowered for just such a run, it is used as it is. Either is verified before it runs.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_pp.errors import FileFormatError
from megatron_pp.plan.costs.files import read_text
from megatron_pp.plan.io.serialize import load_plan
from megatron_pp.plan.ir.instruction import COPIES_TO_HOST, JOINED_OPS, WEIGHT_GRAD, each, unjoined
from megatron_pp.plan.ir.repeated import Line, Lines
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders.family import Family, Order, Shape


@lru_cache(maxsize=16)
def family_of_file(path: str) -> Family:
    """The family of the file at ``path``, for one pipeline size, number of chunks and number of microbatches. The file
    is read once per process. Raises FileFormatError, PlanError.
    """
    text = read_text(path)
    plan = load_plan(path)
    given = _FilePlan(path, plan)
    spec = plan.spec
    return Family(
        path,
        given.orders,
        source=f"the file {path}",
        summary=spec.describe(),
        placement=plan.placement.kind,
        chunks=spec.num_chunks,
        splits_weight=any(at.op == WEIGHT_GRAD for order in plan.orders for at in each(order)),
        programs=given.programs,
        digest=hashlib.sha256(text.encode()).hexdigest()[:16],
        shape=spec.shape,
        sliced=spec.num_parts > 1,
        added=given.added,
    )


@dataclass(frozen=True)
class _FilePlan:
    path: str
    plan: Plan

    def orders(self, shape: Shape) -> list[Order]:
        spec = self.plan.spec
        if (spec.pipeline_size, spec.num_microbatches) != (shape.pipeline_size, shape.num_microbatches):
            raise FileFormatError(
                f"{self.path} is a schedule of {spec.num_microbatches} microbatches on {spec.pipeline_size} ranks; "
                f"this step has {shape.num_microbatches} on {shape.pipeline_size}"
            )
        if spec.num_parts != shape.num_parts:
            raise FileFormatError(
                f"{self.path} is a schedule of {spec.num_parts} slice(s) a sequence; this step has {shape.num_parts}"
            )
        return [list(unjoined(order)) for order in self.plan.orders]  # lowering joins operations again if it should

    def added(self, shape: Shape) -> dict[str, Any]:
        """The number of chunks of a rank that offload in the file's programs, as a setting."""
        ran = (at for program in self.plan.programs for at in program)
        chunks = max((at.chunk + 1 for at in ran if at.op in COPIES_TO_HOST), default=0)
        return {"offload_chunks": chunks} if chunks else {}

    def programs(self, spec: PlanSpec) -> Sequence[Line] | None:
        """The file's own programs if they were lowered for ``spec``. If a file holds only orders, its programs are
        lowered for the device of the run."""
        of_the_run = ["schedule", "measured", "digest", "group_size", "split_backward"]
        if not isinstance(self.plan.programs, Lines):
            of_the_run.append("device")
        mine = replace(self.plan.spec, **{name: getattr(spec, name) for name in of_the_run})
        joins = any(at.op in JOINED_OPS for program in self.plan.programs for at in program)
        return self.plan.programs if mine == spec and (spec.joins or not joins) else None
