"""Megatron's `--hybrid-layer-pattern` is read in one place."""

from __future__ import annotations

import pytest

from megatron_pp.config.hybrid_pattern import HybridPattern


@pytest.mark.parametrize(
    ("text", "stages", "predictions"),
    [
        ("M*-", ("M*-",), ()),
        ("M*|M-", ("M*", "M-"), ()),
        ("M*|M-/M*/M*", ("M*", "M-"), ("M*", "M*")),
        ("'M|M'", ("M", "M"), ()),
        ("", ("",), ()),
        (None, ("",), ()),
    ],
)
def test_a_hybrid_pattern_is_read_as_stages_and_predictions(
    text: str | None, stages: tuple[str, ...], predictions: tuple[str, ...]
) -> None:
    found = HybridPattern.read(text)
    assert found == (stages, predictions)
    assert found.layers == "".join(stages)
    assert found.names_stages == (len(stages) > 1)
    assert str(found) == (text or "").strip("'")
