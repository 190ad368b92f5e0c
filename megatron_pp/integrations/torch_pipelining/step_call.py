"""One step of torch's stages under one of our plans."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.torch_pipelining.batch import Batch
from megatron_pp.integrations.torch_pipelining.hops import Edge, HopRunner
from megatron_pp.integrations.torch_pipelining.last_outputs import LastOutputs
from megatron_pp.integrations.torch_pipelining.stage_steps import StageSteps
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime.executor import Feature
from megatron_pp.runtime.step import StepCall

if TYPE_CHECKING:
    from megatron_pp.integrations.torch_pipelining.schedule import PlanSchedule


class TorchCall(StepCall):
    """One call of ``PlanSchedule.step`` or ``eval``."""

    followed_by = "the work after the step (optimizer)"
    whole_by_choice = True  # ``Splitting`` says itself why a rank's backwards are whole

    def __init__(
        self,
        schedule: PlanSchedule,
        config: ModelParallelConfig,
        batch: Batch,
        edges: Sequence[Edge],
        forward_only: bool,
        keeps_outputs: bool,
    ) -> None:
        self.schedule, self.batch, self.edges = schedule, batch, edges
        self.outputs = LastOutputs(schedule.merge_spec) if keeps_outputs else None
        self.merged: Any = None
        modules = [call.stage.submod for call in schedule.calls]
        super().__init__(
            chunked=len(modules) > 1,
            alone=False,
            forward_step_func=schedule.step,
            data_iterator=[None] * len(modules),
            model=modules,
            num_microbatches=schedule.n_microbatches,
            forward_only=forward_only,
            pg_collection=SimpleNamespace(pp=schedule.group),
            config=config,
        )

    def tensor_shapes(self) -> tuple[list[Any], list[Any]]:
        """As one shape, the elements of the largest hop; ``HopRunner`` knows what it is made of."""
        width = (self.settings.pipeline_dtype or torch.float32).itemsize
        sizes = (sum(torch.Size(m.shape).numel() * m.dtype.itemsize for m in edge) for edge in self.edges)
        shapes: list[Any] = [(max(sizes, default=0) // width,)]
        return shapes, list(shapes)

    def weight_store(self) -> Any:
        """Of ``split_weight_grad``, which is called for the modules of a schedule that splits backwards, and of stages
        with a ``dw_builder``."""
        if self.inputs.forward_only:
            return None
        schedule = self.schedule
        builders = [call.stage.dw_builder for call in schedule.calls]
        if any(builder is not None for builder in builders) and self.settings.measure:
            raise ScheduleInputError(
                "config.measure counts what a W keeps, which is not known where a dw_builder keeps it; leave one of "
                "the two out"
            )
        splits = find_family(schedule.schedule).splits_weight
        return schedule.splitting.store(self.inputs.chunks, builders, splits)

    def make_steps(self, plan: Plan) -> StageSteps:
        schedule, given = self.schedule, (self.schedule.calls, self.edges, self.batch)
        trains = not self.inputs.forward_only
        return StageSteps(*given, schedule.loss_fn, self.outputs, trains, self.settings.shapes_vary)

    def describe(self, plan: Plan) -> dict[str, str]:
        return {**super().describe(plan), "tensors between stages": str(self.edges)}

    def finish(self, steps: StageSteps) -> None:
        super().finish(steps)
        schedule = self.schedule
        if self.outputs is not None and any(call.is_last for call in schedule.calls):
            self.merged = self.outputs.merged()
        if self.inputs.forward_only:
            # No backward of an earlier stage is waited for: it may still find that what it sent was written to.
            schedule.ranks.any_of([False])

    def _features(self, plan: Plan, steps: Any) -> list[Feature]:
        return [*super()._features(plan, steps), HopRunner(self.edges, not self.inputs.forward_only)]
