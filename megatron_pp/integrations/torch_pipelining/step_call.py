"""One step of torch's stages under one of our plans."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.torch_pipelining.autograd_split import AutogradSplit
from megatron_pp.integrations.torch_pipelining.batch import Batch
from megatron_pp.integrations.torch_pipelining.hops import Edge, HopRunner
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

    def __init__(
        self, schedule: PlanSchedule, batch: Batch, edges: Sequence[Edge], forward_only: bool, keeps_outputs: bool
    ) -> None:
        self.schedule, self.batch, self.edges, self.keeps_outputs = schedule, batch, edges, keeps_outputs
        self.split: AutogradSplit | None = None
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
            config=schedule.config_of_step(),
        )

    def tensor_shapes(self) -> list[Any]:
        """As one shape, the elements of the largest hop; ``HopRunner`` knows what it is made of."""
        width = (self.settings.pipeline_dtype or torch.float32).itemsize
        sizes = (sum(torch.Size(m.shape).numel() * m.dtype.itemsize for m in edge) for edge in self.edges)
        return [(max(sizes, default=0) // width,)]

    def weight_store(self) -> Any:
        """Of ``split_weight_grad``, else a split by autograd's graph where the schedule splits backwards."""
        store = super().weight_store()
        if store is not None or self.inputs.forward_only:
            return store
        schedule = self.schedule
        builders = [call.stage.dw_builder for call in schedule.calls]
        if find_family(schedule.schedule).splits_weight or any(builders):
            if self.settings.measure:
                raise ScheduleInputError(
                    "config.measure counts what a W keeps, which is not known where autograd's graph or a dw_builder "
                    "keeps it; call megatron_pp.split_weight_grad with the modules of this rank's stages"
                )
            self.split = AutogradSplit(self.inputs.chunks, builders)
        return self.split

    def make_steps(self, plan: Plan) -> StageSteps:
        schedule = self.schedule
        kept = self.keeps_outputs, self.settings.shapes_vary
        return StageSteps(schedule.calls, self.edges, self.batch, schedule.loss_fn, self.split, *kept)

    def describe(self, plan: Plan) -> dict[str, str]:
        return {**super().describe(plan), "tensors between stages": str(self.edges)}

    def finish(self, steps: StageSteps) -> None:
        self.outputs = steps.outputs
        super().finish(steps)

    def _features(self, plan: Plan, steps: Any) -> list[Feature]:
        return [*super()._features(plan, steps), HopRunner(self.edges, not self.inputs.forward_only)]
