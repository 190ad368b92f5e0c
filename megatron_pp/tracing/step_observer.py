"""The base of observers that take part in the phases of a step. A step has one for each setting that asks for it."""

from collections.abc import Sequence
from typing import Any

from megatron_pp.plan.ir.spec import Plan
from megatron_pp.tracing.observers import Observer


class StepObserver:
    """Takes part in a step for a setting. Each method belongs to a phase and by default does nothing. A module that a
    step loads for a setting has a function ``step_observer``, which gets the StepRequest and makes one, or returns
    None. ``step`` is the Step."""

    def next_plan(self, step: Any, plan: Plan) -> Plan:
        """The plan that the step runs: ``plan``, which its settings ask for, or what replaces it."""
        return plan

    def observers(self, step: Any, plan: Plan, size: float) -> Sequence[Observer]:
        """The observers of the instructions. ``size``: bytes of an activation."""
        return ()

    def watch(self, engine: Any) -> None:
        """Called with the engine that runs the step, before it runs."""

    def after_step(self, step: Any, plan: Plan, guard: Any) -> None:
        """Called when gradients are finalised. ``guard`` is the fault guard of the step, or None."""

    def description(self, plan: Plan, splits: bool) -> dict[str, str]:
        """Further values that ranks must agree on: name -> text. ``splits``: whether the model splits its backward."""
        return {}
