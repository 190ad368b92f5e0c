"""Measured memory beside what check estimates."""

from __future__ import annotations

import statistics

from check_memory import NAME, PAGE, RUNS, data_file, row
from made_parts import read_data

from megatron_pp.tools.check.memory import TOO_HIGH, TOO_LOW

_, *ROWS = read_data(PAGE, NAME)


def test_the_table_is_what_check_estimates() -> None:
    assert [row(run)[0] for run in RUNS] == ROWS


def test_errors_are_as_large_as_the_answer_and_the_page_say() -> None:
    errors = [int(line[5].rstrip("%")) for line in ROWS]
    assert (min(errors), max(errors)) == (-round(100 * TOO_LOW), round(100 * TOO_HIGH))
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert data_file(PAGE, NAME).name in text
    assert f"{len(ROWS)} runs" in text
    spread = f"from {-min(errors)}% too low to {max(errors)}% too high"
    assert f"{-round(statistics.median(errors))}% too low in the median, {spread}" in text
