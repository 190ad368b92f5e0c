"""Which features a step has, and their hooks (``step_hooks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megatron_pp.config.settings import StepSettings
from megatron_pp.feature_table import FEATURES, Row
from megatron_pp.on_demand import is_loaded, load, path_of
from megatron_pp.plan.builder import settings_of
from megatron_pp.plan.ir.feature import rows_asked_by
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import find_family

if TYPE_CHECKING:
    from megatron_pp.runtime.step_hooks import StepHooks

_OF_MODELS = [row for row in FEATURES if row.of_models]
MODULES_OF_MODELS = [path_of(row.step) for row in _OF_MODELS]


def step_hooks(spec: PlanSpec) -> list[StepHooks]:
    """The hooks of the features in a plan of ``spec``, and of features for which the program has made a layer."""
    rows = rows_in(spec, find_family(spec.schedule).barriers)
    of_models = [row for row in _OF_MODELS if row not in rows and is_loaded(path_of(row.step))]
    return [load(row.step).STEP for row in (*rows, *of_models)]


def why_not_in_megatron(settings: StepSettings, barriers: int) -> str:
    """Why Megatron's models cannot have a feature that ``settings`` ask for, or a schedule with ``barriers``; empty
    where they can."""
    rows = list(rows_asked_by(settings))
    if barriers:
        rows += [row for row in FEATURES if row.of_barriers]
    return next((why for row in rows if row.step and (why := load(row.step).STEP.why_not_in_megatron(settings))), "")


def hooks_of(plan: Plan) -> list[StepHooks]:
    """The hooks of the plan's features, from the innermost to the outermost."""
    return [load(row.step).STEP for row in rows_in(plan.spec, plan.placement.barriers)]


@lru_cache(maxsize=256)
def rows_in(spec: PlanSpec, barriers: int) -> tuple[Row, ...]:
    """The features that a plan of ``spec`` has."""
    settings = settings_of(spec)
    return tuple(row for row in FEATURES if row.step and _has(row, settings, barriers))


def _has(row: Row, settings: Mapping[str, Any], barriers: int) -> bool:
    return any(name in settings for name in row.spec) or (row.of_barriers and barriers > 0)
