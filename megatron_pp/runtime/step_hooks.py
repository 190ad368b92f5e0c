"""The hooks of features in a step: before there is any communication, and in the engine. Features derive from them. A
step that has no feature loads none (``step_features.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.config.settings import StepSettings
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.compute import Shapes
from megatron_pp.runtime.engine.executor import Feature
from megatron_pp.runtime.engine.model_steps import ModelSteps
from megatron_pp.runtime.message_shapes import Messages


@dataclass(frozen=True)
class FeatureRun:
    """The values from which a feature's part of the engine is made.

    steps          what runs a microbatch through a chunk
    shapes         of messages, by part; ``lengths`` of the parts in tokens, () where microbatches are whole
    graphs         whether stages build autograd graphs in evaluation too
    settings       of the step
    outer          parts of other features, which run around this one"""

    plan: Plan
    communicator: P2PCore
    chunks: Sequence[Any]
    steps: Any
    shapes: Sequence[Shapes]
    lengths: Sequence[int]
    graphs: bool
    settings: StepSettings
    outer: list[Feature]


def runners(plan: Plan, features: Sequence[StepHooks], **run: Any) -> list[Feature]:
    """The features that run instructions of ``plan`` besides the engine's own, from the innermost to the outermost.
    ``features``: the hooks of the plan's features in this order; ``run``: the other fields of a ``FeatureRun``."""
    found: list[Feature] = []
    given = FeatureRun(plan, outer=found, **run)
    for hooks in reversed(features):
        made = hooks.runner(given)
        if made is not None:
            found.insert(0, made)
    return found


class StepHooks:
    """The hooks of a feature in steps that have it. They hold no state, and by default do nothing."""

    def why_not_in_megatron(self, settings: StepSettings) -> str:
        """Why Megatron's models cannot have it; empty where they can."""
        return ""

    def check_draft(self, draft: PlanSpec, inputs: StepInputs, settings: StepSettings) -> None:
        """Raises ScheduleInputError for a step that it cannot be in."""

    def check(self, draft: PlanSpec, inputs: StepInputs, settings: StepSettings, wanted: Messages) -> None:
        """The same, with the messages that stages give each other."""

    def cut(
        self, inputs: StepInputs, settings: StepSettings, tp_size: int, cp_size: int, shapes: Shapes
    ) -> tuple[tuple[int, ...], tuple[Shapes, ...]] | None:
        """Lengths in tokens of what it cuts sequences into, and the shapes of their messages; None where it does
        not."""
        return None

    def steps(self) -> type[ModelSteps] | None:
        """The class that runs a microbatch through a chunk, in place of ``ModelSteps``."""
        return None

    def runner(self, run: FeatureRun) -> Feature | None:
        """The object that runs the feature's instructions."""
        return None
