"""A step as a value: what a call of a schedule function asks for (``StepRequest``), also of the plan
(``PlanRequest``), and what it runs (``Step``), with the plan as one rank runs it (``RankPlan``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.common.log_once import warn_once
from megatron_pp.config.settings import StepSettings
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.compute import Shapes
from megatron_pp.runtime.message_shapes import Messages

if TYPE_CHECKING:
    from megatron_pp.tracing.step_observer import StepObserver
    from megatron_pp.weight_grad.store import WeightGradStore


@dataclass(frozen=True, eq=False)
class StepRequest:
    """The request of a call, checked before there is any communication.

    number            the program's own number of the step, which all ranks compare; None where it gives none
    cp_size           ranks that split a sequence
    weights           the store of this rank's chunks, None where they are not converted
    joins             whether the model runs two operations as one
    draft             the plan's spec, without what depends on the communicator
    shapes            of messages, by part
    lengths           of the parts in tokens, where a feature divides microbatches
    microbatch_costs  what each microbatch costs; () where nothing says so"""

    inputs: StepInputs
    settings: StepSettings
    alone: bool
    number: int | None
    cp_size: int
    weights: WeightGradStore | None
    joins: bool
    draft: PlanSpec
    messages: Messages
    shapes: tuple[Shapes, ...]
    lengths: tuple[int, ...]
    microbatch_costs: tuple[float, ...]

    @property
    def config(self) -> Any:
        return self.inputs.config


@dataclass(frozen=True, eq=False)
class PlanRequest(StepRequest):
    """A request with the spec of the plan that its communicator can run. ``observers``: what its settings add."""

    observers: Sequence[StepObserver]
    communicator: P2PCore
    spec: PlanSpec

    @property
    def packs(self) -> str:
        """A digest of the packs in the microbatches of a training step of packed sequences; "" for other steps."""
        digest = None if self.inputs.forward_only else getattr(self.settings.microbatch_costs, "digest", None)
        return "" if digest is None else digest()

    def announce(self, message: str) -> None:
        """Log ``message`` once per job."""
        if self.communicator.transport.global_rank(self.communicator.rank) == 0:
            warn_once(message)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """A plan as one rank runs it, with all that a step looks up in it.

    is_last_stage        of each chunk, whether the loss is computed there
    checkpoint_flags     of ``StepOptions``
    prepares_in_forward, last_reentry   of ``SyncHooks``; see ``plan/lower/syncs.py``
    received, sent       bytes of an activation that this rank receives, and sends; 0 where they are not known
    largest              bytes of the largest message; 0 where they are not known
    grouped              whether messages go out as grouped calls
    has_features         whether features run a part of it
    agreed               what all ranks of the pipeline have to agree on"""

    plan: Plan
    tasks: Sequence[Task]
    is_last_stage: Sequence[bool]
    checkpoint_flags: dict[tuple[int, int], bool] | None
    prepares_in_forward: bool
    last_reentry: int
    received: float
    sent: float
    largest: float
    grouped: bool
    has_features: bool
    agreed: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Step(PlanRequest):
    """The step that a call runs. ``is_known``: an earlier call has run it."""

    of_rank: RankPlan
    is_known: bool = False
