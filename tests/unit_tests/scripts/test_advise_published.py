"""Published steps beside the advisor's estimates."""

from __future__ import annotations

import statistics

import pytest
from advise_published import PAGE, Run, data_file, published, row
from made_parts import read_data

RUNS = tuple(published())
_, *ROWS = read_data(PAGE, "advise_published")


@pytest.mark.parametrize(("run", "line"), [pair for pair in zip(RUNS, ROWS, strict=True) if pair[0].gpu == "mi355x"])
def test_the_table_is_what_the_advisor_estimates(run: Run, line: list[str]) -> None:
    assert row(run)[0] == line


@pytest.mark.slow
def test_the_recorded_table_repeats_in_full() -> None:
    assert [row(run)[0] for run in RUNS] == ROWS


def test_errors_are_as_large_as_the_page_says() -> None:
    """Half of them below 15%."""
    errors = [abs(float(line[7].rstrip("%"))) for line in ROWS]
    assert len(ROWS) == 30
    assert statistics.median(errors) <= 15
    assert max(errors) == 91
    assert {line[0].split(",")[0] for line in ROWS} >= {"DeepSeek-V3", "Qwen3-235B", "Mixtral 8x22B"}
    assert data_file(PAGE, "advise_published").name in PAGE.read_text(encoding="utf-8")
