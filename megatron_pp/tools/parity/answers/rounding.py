"""Finds the first sum of a layout that has another order than in one process, if numbers differ only by rounding."""

from __future__ import annotations

from megatron_pp.tools.parity.answers.comparison import Comparison, Difference
from megatron_pp.tools.parity.layout import Layout
from megatron_pp.tools.parity.records.recorder import BACKWARD, FORWARD, GRADIENT, LOGGED, LOSS, NORM, is_state

_PARTIAL = "each {0} rank adds up its own part, and then the parts are added"
_SUMS = {
    FORWARD: (("TP", _PARTIAL), ("CP", "attention adds up over keys that are gathered"), ("EP", _PARTIAL)),
    LOSS: (("TP", _PARTIAL), ("CP", _PARTIAL)),
    BACKWARD: (("TP", _PARTIAL), ("CP", _PARTIAL), ("EP", _PARTIAL)),
    GRADIENT: (
        ("DP", "each replica adds up its own microbatches, and then the replicas are added"),
        ("CP", _PARTIAL),
        ("TP", _PARTIAL),
        ("EP", _PARTIAL),
        ("PP", "each stage adds up its own microbatches, and then the stages that share the parameter are added"),
    ),
    NORM: (
        ("PP", "each stage adds up the squares of its own gradients, and then the stages are added"),
        *((name, _PARTIAL) for name in ("TP", "DP", "CP", "EP")),
    ),
    LOGGED: tuple((name, _PARTIAL) for name in ("DP", "CP", "TP", "PP")),
}


def first_rounded(found: Comparison, layout: Layout) -> str | None:
    """The first operation that is not equal to the last bit, and the reason; None if all are equal."""
    first = next((one for one in found.differences if not one.exact), None)
    if first is None:
        return None
    where = f"{_words(first)}, step {first.key.step}"
    why = [text.format(name) for name, text in _SUMS.get(first.key.kind, ()) if layout.size(name) > 1]
    return f"{where} ({why[0]})" if why else where


def _words(one: Difference) -> str:
    kind = one.key.kind
    name = one.key.name
    if is_state(kind) or name != kind:
        return name if kind == NORM else f"{kind} of {name}"
    return name
