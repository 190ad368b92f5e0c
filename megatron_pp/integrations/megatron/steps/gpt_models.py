"""Builds Megatron-core's GPTModel and HybridModel for the placement of their schedule: `PlacedModel` replaces their
`__init__`.

Models whose stages are in a loop are built as before. `v_placement` builds those in a V; it is loaded for the first of
them.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from megatron_pp.common.object_table import ObjectTable
from megatron_pp.errors import ScheduleInputError
from megatron_pp.on_demand import MODULES, is_loaded, load
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE
from megatron_pp.plan.orders import placement_kind


@dataclass(eq=False)
class Use:
    """The placement that the models of this process are built for.

    schedule     the argument of `place_models`; None: the schedule that the model's config names
    kind         the placement of the models with virtual stages; None before the first of them
    first_stage  the latest model that holds the first stage
    in_v         the models that are built for a V
    ended        the engine was uninstalled: models that are built by what a program has kept are Megatron's
    """

    schedule: str | None = None
    kind: str | None = None
    first_stage: Callable[[], Any] | None = None
    in_v: ObjectTable[None] = field(default_factory=ObjectTable)
    ended: bool = False

    def placement_of(self, config: Any) -> str:
        """The placement of the stages of a model with this config."""
        if self.ended or config.pipeline_model_parallel_size == 1:
            return LOOP
        return placement_kind(self.schedule_of(config))

    def schedule_of(self, config: Any) -> str | None:
        return self.schedule or getattr(config, "pipeline_schedule", None)

    def agree(self, kind: str) -> None:
        """Raises for a second placement in a process: Megatron's functions get a chunk's number, and not its model."""
        if self.kind not in (None, kind):
            raise ScheduleInputError(
                f"a model with stages in a {kind} was built after one with stages in a {self.kind}; call uninstall() "
                "and install() between them"
            )
        self.kind = kind


class Replacement:
    """Replaces a function or method of Megatron's, with the same signature. It is pickled by name, as a function is."""

    def __init__(self, original: Callable[..., Any], use: Use) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.use = use
        self.parameters = inspect.signature(original).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.original.__qualname__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, by name."""
        return dict(zip(self.parameters, args, strict=False)) | kwargs


def has_built_v() -> bool:
    """Whether this program has built the chunks of a V, or has asked for them."""
    return is_loaded(MODULES["v_placement"])


class PlacedModel(Replacement):
    """Builds a model for its schedule."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        given = self.given(args, kwargs)
        if self.use.placement_of(given["config"]) == V_SHAPE:
            load("v_placement").build(self, given)
            return
        if given.get("vp_stage") is not None and not self.use.ended:
            self.use.agree(LOOP)
        super().__call__(*args, **kwargs)


# Module and class of each model that is built for a V; a release may not have all of them.
MODELS = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel"),
    ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),
)

# Process-wide, as the models' classes are. Of classes that were removed with their modules too.
USES: ObjectTable[None] = ObjectTable()


def place_models(schedule: str | None, classes: Sequence[type]) -> None:
    """Build models of these ``classes`` for ``schedule``, or for that of their config if it is None, from now on. A
    further call changes ``schedule``."""
    placed = [vars(model)["__init__"] for model in classes]
    use = next((one.use for one in placed if isinstance(one, PlacedModel)), None) or Use()
    in_place = [one if isinstance(one, PlacedModel) else PlacedModel(one, use) for one in placed]
    use.schedule = schedule
    USES[use] = None
    for model, one in zip(classes, in_place, strict=True):
        model.__init__ = one  # type: ignore[misc]
    if classes and placement_kind(schedule) == V_SHAPE:
        load("v_placement").ask_by_chunk(use)
