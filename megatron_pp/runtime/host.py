"""``Host``: the parts of a step that differ between training stacks.

``Host`` has what most stacks do alike. Four hosts derive from it: of the library's own loop (``own_host.py``), of
Megatron-core's, of torch's stages, and of pipelines of several modules.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from megatron_pp.config.settings import StepSettings
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.runtime import plan_choice
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.executor import Feature
from megatron_pp.runtime.message_shapes import tensor_shapes
from megatron_pp.runtime.model_checks.chunk_places import check_places, describe_layers
from megatron_pp.runtime.step import PlanRequest, Step
from megatron_pp.runtime.step_features import hooks_of, rows_in

if TYPE_CHECKING:
    from megatron_pp.weight_grad.store import WeightGradStore


class Host:
    """The host of one call of a schedule function. ``inputs``: the call's arguments; ``alone``: without a pipeline.

    followed_by          what the training loop does with other ranks between steps, in words. The fault guard watches
                         it too; "" if it does nothing
    graph_in_evaluation  whether evaluation leaves autograd as the caller has it, or builds no graph
    keeps_calls          whether a later call may reuse the results of this one; see ``kept_calls.py``
    local                whether ranks of a pipeline may each make a call without one, as for a teacher
    whole_by_choice      the user chose whole backwards: do not warn of chunks that do not split theirs"""

    followed_by = ""
    graph_in_evaluation = False
    keeps_calls = False
    local = False
    whole_by_choice = False

    def __init__(self, inputs: StepInputs, alone: bool) -> None:
        self.inputs = inputs
        self.alone = alone

    @property
    def joins(self) -> bool:
        """Whether what ``steps`` makes runs two operations as one (``forward_and_backward``)."""
        return False

    # -- before there is any communication; each raises ScheduleInputError ---------------------------------------------

    def read_settings(self) -> StepSettings:
        """The options of the step as they are now, not checked but for options that there were."""
        return StepSettings.read(self.inputs.config)

    def check_settings(self, settings: StepSettings) -> None:
        settings.check()

    def compared(self, settings: StepSettings, group: Any) -> tuple[Any, ...]:
        """Further arguments of the call on which the step of the pipeline ``group`` depends. Where shapes vary, stages
        find them out in each step."""
        inputs = self.inputs
        return () if settings.shapes_vary else (inputs.seq_length, inputs.micro_batch_size, inputs.decoder_seq_length)

    def shapes_compared(self, settings: StepSettings, group: Any) -> tuple[Any, ...]:
        """Shapes of messages that depend on more than the step's settings and what ``compared`` gives. Called only if
        all of that is as in an earlier call, or has been checked."""
        return ()

    def step_number(self, settings: StepSettings) -> int | None:
        """The program's own number of the step, which all ranks compare; None if it gives none."""
        return settings.given_step_number()

    def weight_store(self, settings: StepSettings) -> WeightGradStore | None:
        """The store of this rank's chunks; None if they are not converted."""
        if "megatron_pp.weight_grad" not in sys.modules:  # nothing else converts chunks
            return None
        from megatron_pp.weight_grad import store_of

        return store_of(self.inputs.chunks)

    def tensor_shapes(self, settings: StepSettings, tp_size: int, cp_size: int) -> tuple[list[Any], list[Any]]:
        """Shapes of the tensors that this rank receives and sends, one per tensor, before
        ``adjust_tensor_shapes_fn``."""
        inputs = self.inputs
        lengths = inputs.seq_length, inputs.micro_batch_size, inputs.decoder_seq_length
        shapes = tensor_shapes(*lengths, settings, tp_size, cp_size)
        return shapes, list(shapes)

    def check(self, asked: PlanRequest) -> None:
        """Raises for a step that the training stack cannot run."""

    # -- the plan ------------------------------------------------------------------------------------------------------

    def plan(self, asked: PlanRequest) -> Plan:
        """The verified plan of ``asked.spec``. Advice and warnings about it are logged once."""
        plan, settings, communicator = build_plan(asked.spec, asked.announce), asked.settings, asked.communicator
        plan_choice.certify_once(plan)
        if not asked.spec.forward_only:
            plan_choice.warn_of_limits(plan, asked.weights is not None or self.whole_by_choice)
            if settings.finalize_model_grads_func is None:
                self._warn_of_unsynchronised(asked, plan)
        if communicator.transport.backend == "nccl":
            from megatron_pp.runtime.model_checks import queue_advice

            advice = queue_advice.advice_on_queues(plan, settings, communicator, self.inputs.chunks)
            if advice is not None:
                asked.announce(advice)
        return plan

    def _warn_of_unsynchronised(self, asked: PlanRequest, plan: Plan) -> None:
        from megatron_pp.runtime.model_checks.unsynchronised import unsynchronised

        groups = asked.communicator.pp_group, self.inputs.pg_collection
        for sentence in unsynchronised(asked.settings, self.inputs.chunks, plan.placement, *groups):
            asked.announce(sentence)

    def check_chunks(self, step: Step, plan: Plan) -> None:
        """Raises for a chunk that was built for another stage. Called before any communication, and under the guard, so
        that peers raise an error that names the rank with the wrong chunk."""
        check_places(self.inputs.chunks, plan.placement, step.communicator.rank, step.spec.schedule, step.announce)

    def described(self, step: Step, plan: Plan) -> dict[str, str]:
        """Further values that all ranks of the pipeline must agree on: name -> text."""
        return describe_layers(self.inputs.chunks, plan.placement, step.communicator.rank)

    def is_last_stage(self, asked: PlanRequest, plan: Plan) -> list[bool]:
        """For each chunk, whether the loss is computed there."""
        rank = asked.communicator.rank
        return [plan.placement.is_last_stage(rank, chunk) for chunk in range(len(self.inputs.chunks))]

    def has_features(self, plan: Plan) -> bool:
        """Whether features run a part of the plan."""
        return bool(rows_in(plan.spec, plan.placement.barriers))

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        timers = step.settings.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=step.settings.barrier_with_L1_time)

    def steps(self, step: Step, plan: Plan) -> Any:
        """The ``Steps`` that runs a microbatch through a chunk; it has the ``record`` of a ModelSteps."""
        raise NotImplementedError

    def features(self, step: Step, plan: Plan, steps: Any) -> list[Feature]:
        """The features that run instructions of the plan that are not the engine's own, innermost first."""
        if not step.of_rank.has_features:
            return []
        from megatron_pp.runtime.step_hooks import runners

        return runners(
            plan,
            hooks_of(plan),
            communicator=step.communicator,
            chunks=self.inputs.chunks,
            steps=steps,
            shapes=step.shapes,
            lengths=step.lengths,
            graphs=self.graph_in_evaluation,
            settings=step.settings,
        )

    def finish(self, step: Step, steps: Any) -> None:
        """Called after the last instruction: finalises gradients and stops the timer."""
        raise NotImplementedError

    def stop_timer(self, step: Step) -> None:
        if step.settings.timers is not None:
            step.settings.timers("forward-backward").stop()
