"""One step of torch's stages under one of our plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.torch_pipelining.agreement import Ranks
from megatron_pp.integrations.torch_pipelining.batch import Batch
from megatron_pp.integrations.torch_pipelining.hops import Edge, HopRunner
from megatron_pp.integrations.torch_pipelining.last_outputs import LastOutputs
from megatron_pp.integrations.torch_pipelining.splitting import Splitting
from megatron_pp.integrations.torch_pipelining.stage_steps import StageSteps
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.executor import Feature
from megatron_pp.runtime.own_host import OwnHost
from megatron_pp.runtime.step import Step


class StagesOfRank(Protocol):
    """The fields that a step needs of a ``PlanSchedule``, whose documentation explains the fields."""

    calls: list[Any]
    group: Any
    loss_fn: Callable[..., Any] | None
    merge_spec: Any
    n_microbatches: int
    ranks: Ranks
    schedule: str
    splitting: Splitting

    @property
    def step(self) -> Callable[..., Any]: ...


class TorchHost(OwnHost):
    """The host of one call of ``PlanSchedule.step`` or ``eval``."""

    followed_by = "the work after the step (optimizer)"
    keeps_calls = False
    whole_by_choice = True  # no second warning: ``Splitting`` logs why a rank's backwards are whole

    def __init__(
        self,
        schedule: StagesOfRank,
        config: ModelParallelConfig,
        batch: Batch,
        edges: Sequence[Edge],
        forward_only: bool,
        keeps_outputs: bool,
    ) -> None:
        self.schedule = schedule
        self.batch = batch
        self.edges = edges
        self.outputs = LastOutputs(schedule.merge_spec) if keeps_outputs else None
        self.merged: Any = None
        modules = [call.stage.submod for call in schedule.calls]
        inputs = StepInputs(
            len(modules) > 1,
            forward_step_func=schedule.step,
            data_iterator=[None] * len(modules),
            model=modules,
            num_microbatches=schedule.n_microbatches,
            forward_only=forward_only,
            pg_collection=SimpleNamespace(pp=schedule.group),
            config=config,
        )
        super().__init__(inputs, alone=False)

    def tensor_shapes(self, settings: StepSettings, tp_size: int, cp_size: int) -> tuple[list[Any], list[Any]]:
        """One shape with the number of elements of the largest hop; ``HopRunner`` knows the tensors of each hop."""
        width = (settings.pipeline_dtype or torch.float32).itemsize
        sizes = (sum(torch.Size(m.shape).numel() * m.dtype.itemsize for m in edge) for edge in self.edges)
        shapes: list[Any] = [(max(sizes, default=0) // width,)]
        return shapes, list(shapes)

    def weight_store(self, settings: StepSettings) -> Any:
        """The store of ``split_weight_grad``, which is called if the schedule splits backwards, and of stages with a
        ``dw_builder``."""
        if self.inputs.forward_only:
            return None
        schedule = self.schedule
        builders = [call.stage.dw_builder for call in schedule.calls]
        if any(builder is not None for builder in builders) and settings.measure:
            raise ScheduleInputError(
                "config.measure cannot count what a dw_builder keeps for W; leave one of the two out"
            )
        splits = find_family(schedule.schedule).splits_weight
        return schedule.splitting.store(self.inputs.chunks, builders, splits)

    def steps(self, step: Step, plan: Plan) -> StageSteps:
        schedule = self.schedule
        given = (self.schedule.calls, self.edges, self.batch)
        trains = not self.inputs.forward_only
        return StageSteps(*given, schedule.loss_fn, self.outputs, trains, step.settings.shapes_vary)

    def described(self, step: Step, plan: Plan) -> dict[str, str]:
        return {**super().described(step, plan), "tensors between stages": str(self.edges)}

    def finish(self, step: Step, steps: StageSteps) -> None:
        super().finish(step, steps)
        schedule = self.schedule
        if self.outputs is not None and any(call.is_last for call in schedule.calls):
            self.merged = self.outputs.merged()
        if self.inputs.forward_only:
            # This rank does not wait for backwards of earlier stages, which may still raise a SendBufferError.
            schedule.ranks.any_of([False])

    def features(self, step: Step, plan: Plan, steps: Any) -> list[Feature]:
        return [*super().features(step, plan, steps), HopRunner(self.edges, not self.inputs.forward_only)]
