"""What a setting adds to a step around its phases; a step has one for each setting that asks for it."""

from collections.abc import Sequence
from typing import Any

from megatron_pp.plan.ir.spec import Plan
from megatron_pp.tracing.observers import Observer


class StepObserver:
    """What a setting adds to a step, by the phase where it does so; each method does nothing here. A module that
    a step loads for a setting has a function ``step_observer``, which is given the StepRequest and makes one, or
    returns None. ``step`` is the Step."""

    def next_plan(self, step: Any, plan: Plan) -> Plan:
        """The plan that the step runs: ``plan``, which its settings ask for, or what replaces it."""
        return plan

    def observers(self, step: Any, plan: Plan, size: float) -> Sequence[Observer]:
        """What watches the instructions. ``size``: bytes of an activation."""
        return ()

    def watch(self, engine: Any) -> None:
        """The engine that runs the step, before it does."""

    def after_step(self, step: Any, plan: Plan, guard: Any) -> None:
        """Gradients are finalised; ``guard`` is the fault guard of the step, or None."""

    def description(self, plan: Plan, splits: bool) -> dict[str, str]:
        """What else ranks have to agree on, as text by name. ``splits``: whether the model splits its backward."""
        return {}
