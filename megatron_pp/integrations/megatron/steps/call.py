"""One step of a Megatron-core training loop: Megatron's own compute, hooks and finalisation around our plan."""

from __future__ import annotations

import inspect
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.config import rules
from megatron_pp.config.settings import LOCAL_GRAPHS, StepSettings, checked
from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.megatron.given import InstallSettings
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.steps.gpt_models import has_built_v
from megatron_pp.integrations.megatron.steps.known_steps import KnownSteps, MicrobatchSteps
from megatron_pp.integrations.megatron.steps.served.scope import has_attention_residuals
from megatron_pp.integrations.megatron.steps.served.served_configs import COMBINED_1F1B, is_combined
from megatron_pp.plan.ir.placement import V_SHAPE
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import INTERLEAVED, find_family
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.host import Host
from megatron_pp.runtime.step import PlanRequest, Step
from megatron_pp.runtime.step_features import why_not_in_megatron

if TYPE_CHECKING:
    from megatron_pp.integrations.megatron.steps.forward_backward import MegatronSteps
    from megatron_pp.integrations.megatron.steps.v_step import StepsInV
    from megatron_pp.weight_grad import WeightGradStore


@lru_cache(maxsize=8)
def takes_side(shapes_of: Any) -> bool:
    """Whether Megatron's `get_tensor_shapes` returns the shapes that a stage receives or those that it sends."""
    return {"pp_group", "is_recv"} <= inspect.signature(shapes_of).parameters.keys()


class MegatronHost(Host):
    """The host of one call of a Megatron-core schedule: ``arguments`` are its keywords, ``installed`` the settings of
    `install()`.
    """

    followed_by = "the work after the step (data-parallel reduction, optimizer)"
    graph_in_evaluation = True
    local = True  # Megatron's function does not look at the pipeline
    whole_by_choice = True  # else they are converted, or the call is an error

    def __init__(
        self, megatron: Megatron, installed: InstallSettings, *, alone: bool, chunked: bool, **arguments: Any
    ) -> None:
        self.megatron = megatron
        self.installed = installed
        keyword = megatron.row.groups_keyword
        groups = arguments.pop(keyword, None)
        if groups is None:
            megatron.require_initialised()
            groups = megatron.default_groups()
        elif missing := [name for name in megatron.row.groups if not hasattr(groups, name)]:
            raise ScheduleInputError(
                f"{keyword} has no {', '.join(missing)}; set {', '.join(megatron.row.groups)}, or leave it out for the "
                "groups of parallel_state"
            )
        super().__init__(StepInputs(chunked, pg_collection=groups, **arguments), alone)
        self.config = self.inputs.config
        self.keeps_calls = not has_attention_residuals(self.config)
        self.embedding: Any = None

    def check(self, asked: PlanRequest) -> None:
        """Raises ScheduleInputError for what Megatron's models cannot do in a step."""
        schedule, placement = asked.spec.schedule, find_family(asked.spec.schedule).placement
        if asked.communicator.size > 1 and (placement == V_SHAPE or has_built_v()):
            from megatron_pp.integrations.megatron.steps import v_step

            v_step.check_step(schedule, placement, self.config, self.inputs.chunks)
        if asked.weights is not None and self._delays_wgrad:
            raise ScheduleInputError(
                "with config.delay_wgrad_compute Megatron's schedule plans run delayed weight gradients, and after "
                "split_weight_grad the engine does; use one of the two"
            )
        if not self.installed.any_microbatch_count:
            self._refuse_slow_count(asked.spec)

    def _refuse_slow_count(self, spec: PlanSpec) -> None:
        """Raises ScheduleInputError for a number of microbatches that Megatron's interleaved schedule refuses, as it
        costs throughput."""
        if spec.schedule not in (INTERLEAVED, COMBINED_1F1B) or spec.num_chunks == 1 or spec.pipeline_size == 1:
            return
        sizes = spec.num_microbatches, spec.pipeline_size, spec.num_chunks, spec.group_size or spec.pipeline_size
        if not rules.runs_at_full_speed(*sizes):
            from megatron_pp.config.microbatch_counts import slow_count

            why = f"{slow_count(*sizes)}; Megatron-core refuses such a number"
            raise ScheduleInputError(f"{why}, and install(any_microbatch_count=True) runs it")

    def finalizes(self, step: Step) -> bool:
        return not self.inputs.forward_only and step.settings.finalize_model_grads_func is not None

    @cached_property
    def overridden_config(self) -> Any:
        """For those functions of Megatron's that read fields which `install()` may override."""
        if not self.installed.overrides:
            return self.config
        from megatron_pp.integrations.megatron.overridden import with_overrides

        return with_overrides(self.config, self.installed.overrides)

    @property
    def joins(self) -> bool:
        return is_combined(self.config, self.inputs.forward_only)

    def read_settings(self) -> StepSettings:
        settings = StepSettings.read(self.config, self.installed.overrides)
        if self.megatron.captures_layers(self.config):  # 0.14 says so in another field
            settings = settings._replace(cuda_graph_impl=LOCAL_GRAPHS)
        if self.joins and settings.pipeline_schedule is None:
            return settings._replace(pipeline_schedule=COMBINED_1F1B)
        return settings

    def check_settings(self, settings: StepSettings) -> None:
        """Raises ScheduleInputError also for what Megatron's models cannot have."""
        super().check_settings(settings)
        schedule = settings.pipeline_schedule
        barriers = 0 if schedule is None else checked(rules.known_family, schedule).barriers
        why_not = why_not_in_megatron(settings, barriers)
        if why_not:
            raise ScheduleInputError(why_not)

    def compared(self, settings: StepSettings, group: Any) -> tuple[Any, ...]:
        return *super().compared(settings, group), self.megatron, self.installed, self.joins

    def shapes_compared(self, settings: StepSettings, group: Any) -> tuple[Any, ...]:
        """The release, or what the program has put around its function, may read more of the config."""
        sides: list[dict[str, Any]] = [{}]
        if settings.shapes_vary or self.alone or group.size() == 1:
            sides = []
        elif takes_side(self.megatron.schedules.get_tensor_shapes):
            asked = (group.rank() > 0,) if self.inputs.chunked else (True, False)
            sides = [{"pp_group": group, "is_recv": one} for one in asked]
        return tuple(self.ask(self.overridden_config, **side) for side in sides)

    def weight_store(self, settings: StepSettings) -> WeightGradStore | None:
        """Converts the chunks before their first training step on a schedule that splits backwards."""
        store, schedule = super().weight_store(settings), settings.pipeline_schedule
        if store is not None or self.inputs.forward_only or not self.installed.split_weight_grad:
            return store
        if self.alone or schedule is None or not find_family(schedule).splits_weight or self._delays_wgrad:
            return None
        from megatron_pp.integrations.megatron.steps import conversion

        return conversion.split_for(schedule, self.inputs.chunks)

    @property
    def _delays_wgrad(self) -> bool:
        """Whether Megatron's schedule plans run the weight gradients, after the rest of their backward."""
        return self.joins and getattr(self.config, "delay_wgrad_compute", False)

    def begin(self, step: Step) -> None:
        config, schedules = self.config, self.megatron.schedules
        if self.finalizes(step) and not self.alone:
            self.embedding = schedules.clear_embedding_activation_buffer(
                config, self.inputs.chunks, self.holds_last_stage(step)
            )
        super().begin(step)
        if step.cp_size > 1 and not (self.inputs.forward_only or step.settings.calculate_per_token_loss):
            from megatron_pp.integrations.megatron.steps import losses

            losses.watch_losses(self.inputs, self.installed.whole_sequence_loss)
        if has_attention_residuals(config) or getattr(config, "moe_paged_stash", False):
            from megatron_pp.integrations.megatron.steps import resets

            resets.before_step(self.megatron, config, self.inputs.forward_only)

    def tensor_shapes(self, settings: StepSettings, tp_size: int, cp_size: int) -> tuple[list[Any], list[Any]]:
        """By the release's own function."""
        super().tensor_shapes(settings, tp_size, cp_size)  # raises for what is missing
        if takes_side(self.megatron.schedules.get_tensor_shapes):
            from megatron_pp.integrations.megatron.steps import message_sides

            return message_sides.shapes_of_sides(self.inputs, self.alone, self.overridden_config, self.ask)
        shapes = self.ask(self.overridden_config)
        return shapes, list(shapes)

    def ask(self, config: Any, **side: Any) -> list[Any]:
        """The shapes from `get_tensor_shapes`, of a ``side`` of a stage if it takes one. Interleaved schedules use
        neither `decoder_seq_length` nor the function with which a program has wrapped `get_tensor_shapes`: such a
        program has to change their `seq_length`."""
        inputs, groups = self.inputs, self.inputs.pg_collection
        shapes_of = self.megatron.schedules.get_tensor_shapes
        return (inspect.unwrap(shapes_of) if inputs.chunked else shapes_of)(
            seq_length=inputs.seq_length,
            micro_batch_size=inputs.micro_batch_size,
            decoder_seq_length=None if inputs.chunked else inputs.decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
            **side,
        )

    def step_number(self, settings: StepSettings) -> int | None:
        """The config's number; if it gives none, the iteration of Megatron's own training loop."""
        given = super().step_number(settings)
        return self.megatron.current_iteration() if given is None else given

    def steps(self, step: Step, plan: Plan) -> MicrobatchSteps | StepsInV:
        given = self.megatron, step, self.overridden_config
        in_v = self.is_in_v(step)
        if self.joins:
            from megatron_pp.integrations.megatron.steps.combined import CombinedSteps

            return CombinedSteps(*given, in_v=in_v)
        steps: KnownSteps | MegatronSteps
        if self.megatron.has_known_steps():
            steps = KnownSteps(self.megatron, step)
        else:
            from megatron_pp.integrations.megatron.steps.forward_backward import MegatronSteps

            steps = MegatronSteps(*given)
        if not in_v:
            return steps
        from megatron_pp.integrations.megatron.steps.v_step import StepsInV

        return StepsInV(steps, self.megatron.parallel_state)

    def finish(self, step: Step, steps: MicrobatchSteps | StepsInV) -> None:
        """The calls of Megatron's schedules after the last backward, in their order."""
        if self.finalizes(step):
            self._finalize(step, steps.record.num_tokens)
        if self.is_in_v(step):
            from megatron_pp.integrations.megatron.steps import v_step

            v_step.hand_over_reports(steps.record.data, step.communicator)
        evaluated_alone = self.alone and self.inputs.forward_only
        if evaluated_alone or getattr(self.config, "fine_grained_activation_offloading", False):
            from megatron_pp.integrations.megatron.steps import resets

            resets.after_step(self.megatron, self.inputs, evaluated_alone)
        self.stop_timer(step)
        self.megatron.create_graphs(self.config)

    def _finalize(self, step: Step, num_tokens: torch.Tensor) -> None:
        config, row = self.config, self.megatron.row
        if not self.alone:
            self.megatron.schedules.finish_embedding_wgrad_compute(
                config, self.embedding, self.holds_last_stage(step), getattr(self.inputs.pg_collection, "tp", None)
            )
        given = {row.groups_keyword: self.inputs.pg_collection}
        if row.force_all_reduce:
            given["force_all_reduce"] = self.inputs.force_all_reduce
        finalize = partial(config.finalize_model_grads_func, self.inputs.chunks, **given)
        counted = num_tokens if config.calculate_per_token_loss else None
        if not self.is_in_v(step):
            finalize(counted)
            return
        from megatron_pp.integrations.megatron.steps import v_step

        v_step.finalize(finalize, counted, step.communicator.pp_group)

    def holds_last_stage(self, step: Step) -> bool:
        last_rank = 0 if self.is_in_v(step) else step.communicator.size - 1
        return step.communicator.rank == last_rank

    def is_in_v(self, step: Step) -> bool:
        """Whether the first and the last stage are on one rank of several."""
        return step.communicator.size > 1 and step.of_rank.plan.placement.kind == V_SHAPE
