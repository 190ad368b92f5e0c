"""The costs that features have. For type checkers alone: when a program runs, ``cost_hooks.py`` takes them from the
table of features, which says what each is.
"""

from __future__ import annotations

from dataclasses import dataclass

_Times = float | tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """The costs of ``cost_hooks.COST_DEFAULTS``."""

    offload: tuple[float, ...] = ()
    unshard: tuple[float, ...] = ()
    reduce_grad: tuple[float, ...] = ()
    attention: float = 0.0
    output_layer: tuple[float, float, float] = (0.0, 0.0, 0.0)
    passes: tuple[float, ...] = (0.0, 0.0)
    pair_sends: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class MeasuredSettings:
    """Costs of features that a run can measure: a number for every stage, or one number for all."""

    offload: _Times = None
    unshard: _Times = None
    reduce_grad: _Times = None
