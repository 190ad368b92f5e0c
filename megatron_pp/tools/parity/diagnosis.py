"""Which part of a layout brings a difference: parts are switched off in halves, then one by one, then made smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp.tools.parity.comparison import Comparison, Difference
from megatron_pp.tools.parity.layout import Layout
from megatron_pp.tools.parity.processes import RunError
from megatron_pp.tools.parity.verdicts import DIFFERENT

Compare = Callable[[Layout], Comparison]
"""Raises RunError where a layout cannot run."""

_IMPLIED = {"PP": ("VPP",), "experts": ("EP", "ETP"), "DP": ("EP",)}
"""Part -> those that cannot be without it, and so name it."""


@dataclass(frozen=True)
class Smallest:
    """The smallest layout that was found to differ, the parts of it without which it does not, and how it differs."""

    layout: Layout
    parts: list[str]
    comparison: Comparison

    @property
    def dimension(self) -> str:
        return " + ".join(self.parts)


def smallest(layout: Layout, found: Comparison, compare: Compare) -> Smallest:
    """``found``: how ``layout`` differs."""
    search = _FaultSearch(layout, found, compare)
    search.drop_parts()
    search.halve_sizes()
    return Smallest(search.layout, search.guilty(), search.comparison)


class _FaultSearch:
    def __init__(self, layout: Layout, found: Comparison, compare: Compare) -> None:
        self.layout, self.comparison, self.compare = layout, found, compare

    def drop_parts(self) -> None:
        """Delta debugging: groups of half the parts, of a quarter, and so on, until no single part can go."""
        groups = 2
        while True:
            parts = self.layout.parts()
            groups = min(groups, len(parts))
            if not groups:
                return
            sized = [parts[index::groups] for index in range(groups)]
            if any(self._try(_without(self.layout, group)) for group in sized):
                groups = max(groups - 1, 2)
            elif groups == len(parts):
                return
            else:
                groups *= 2

    def halve_sizes(self) -> None:
        for part in self.layout.parts():
            while self._try(self.layout.halved(part)):
                pass

    def guilty(self) -> list[str]:
        """Without these the layout is right; those that others bring with them are left out."""
        parts = self.layout.parts()
        return [part for part in parts if not set(_IMPLIED.get(part, ())) & set(parts)]

    def _try(self, layout: Layout | None) -> bool:
        """Whether this layout differs too; then it is the one to go on with."""
        if layout is None or layout == self.layout:
            return False
        try:
            found = self.compare(layout)
        except RunError:
            return False
        if found.verdict != DIFFERENT:
            return False
        self.layout, self.comparison = layout, found
        return True


def _without(layout: Layout, parts: list[str]) -> Layout:
    for part in parts:
        if part in layout.parts():
            layout = layout.without(part)
    return layout


def ratio_in_words(ratio: float, layout: Layout) -> str:
    """Such as "x 2 = size of CP"."""
    for name in ("CP", "TP", "DP", "EP", "PP", "VPP", "ETP"):
        size = layout.size(name)
        for value, words in ((size, f"size of {name}"), (1 / size, f"1 / size of {name}")):
            if size > 1 and abs(ratio - value) < 1e-3 * value:
                return f"x {ratio:.4g} = {words}"
    return f"x {ratio:.4g}" if abs(ratio - 1) > 1e-3 else f"x (1 {'+-'[ratio < 1]} {abs(ratio - 1):.2g})"


def ratios(differences: list[Difference]) -> float | None:
    """The one ratio that all ranks have."""
    found = [one.ratio for one in differences]
    if not found or any(one is None for one in found):
        return None
    least, most = min(found), max(found)  # type: ignore[type-var]
    return float(sum(found) / len(found)) if most - least <= 1e-3 * abs(most) else None  # type: ignore[arg-type,operator]
