"""Megatron's `--hybrid-layer-pattern`: a letter for each layer, and ``|`` between pipeline stages. The letters after
each ``/`` are those of a layer that predicts one more token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class HybridPattern(NamedTuple):
    """``stages``: letters of the layers of each stage, in model order. If the pattern names no stages, it has one
    entry. ``predictions``: letters of the layers of each further prediction."""

    stages: tuple[str, ...]
    predictions: tuple[str, ...]

    @classmethod
    def read(cls, text: Any) -> HybridPattern:
        """The pattern that ``text`` spells. ``None`` gives a pattern without layers."""
        main, *predictions = ("" if text is None else str(text)).strip("'\"").split("/")
        return cls(tuple(main.split("|")), tuple(predictions))

    @property
    def layers(self) -> str:
        return "".join(self.stages)

    @property
    def names_stages(self) -> bool:
        return len(self.stages) > 1

    def with_stages(self, stages: Iterable[str]) -> HybridPattern:
        return self._replace(stages=tuple(stages))

    def __str__(self) -> str:
        return "/".join(["|".join(self.stages), *self.predictions])
