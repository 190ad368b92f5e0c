"""Finds the part of a layout that causes a difference. Parts are switched off in halves, then one by one; then the
remaining parts are made smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp.tools.parity.answers.comparison import Comparison, Difference
from megatron_pp.tools.parity.answers.verdicts import DIFFERENT
from megatron_pp.tools.parity.layout import Layout
from megatron_pp.tools.parity.workers.processes import RunError

Compare = Callable[[Layout], Comparison]
"""Compares a layout with one process. Raises RunError if the layout cannot run."""

_IMPLIED = {"PP": ("VPP",), "experts": ("EP", "ETP"), "DP": ("EP",)}
"""Part -> parts that need it. If one of them is found, the part itself is not named."""


@dataclass(frozen=True)
class Smallest:
    """The smallest layout that differs, the parts that are necessary for the difference, and its comparison."""

    layout: Layout
    parts: list[str]
    comparison: Comparison

    @property
    def dimension(self) -> str:
        return " + ".join(self.parts)


def smallest(layout: Layout, found: Comparison, compare: Compare) -> Smallest:
    """The smallest layout that differs. ``found`` is the comparison of ``layout``."""
    search = _FaultSearch(layout, found, compare)
    search.drop_parts()
    search.halve_sizes()
    return Smallest(search.layout, search.guilty(), search.comparison)


class _FaultSearch:
    def __init__(self, layout: Layout, found: Comparison, compare: Compare) -> None:
        self.layout = layout
        self.comparison = found
        self.compare = compare

    def drop_parts(self) -> None:
        """Delta debugging: removes groups of half the parts, of a quarter, and so on, until no single part can be
        removed without losing the difference."""
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
        """The parts without which the layout is right. A part that another one needs is left out."""
        parts = self.layout.parts()
        return [part for part in parts if not set(_IMPLIED.get(part, ())) & set(parts)]

    def _try(self, layout: Layout | None) -> bool:
        """Whether this layout differs, too. If so, the search continues with it."""
        if layout is None or layout == self.layout:
            return False
        try:
            found = self.compare(layout)
        except RunError:
            return False
        if found.verdict != DIFFERENT:
            return False
        self.layout = layout
        self.comparison = found
        return True


def _without(layout: Layout, parts: list[str]) -> Layout:
    for part in parts:
        if part in layout.parts():
            layout = layout.without(part)
    return layout


def ratio_in_words(ratio: float, layout: Layout) -> str:
    """The ratio in words, such as "x 2 = size of CP"."""
    for name in ("CP", "TP", "DP", "EP", "PP", "VPP", "ETP"):
        size = layout.size(name)
        for value, words in ((size, f"size of {name}"), (1 / size, f"1 / size of {name}")):
            if size > 1 and abs(ratio - value) < 1e-3 * value:
                return f"x {ratio:.4g} = {words}"
    return f"x {ratio:.4g}" if abs(ratio - 1) > 1e-3 else f"x (1 {'+-'[ratio < 1]} {abs(ratio - 1):.2g})"


def ratios(differences: list[Difference]) -> float | None:
    """The ratio that all ranks have; None if they differ."""
    found = [one.ratio for one in differences if one.ratio is not None]
    if not found or len(found) < len(differences):
        return None
    least = min(found)
    most = max(found)
    return float(sum(found) / len(found)) if most - least <= 1e-3 * abs(most) else None
