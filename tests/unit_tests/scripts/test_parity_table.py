"""docs/parity.md: what a run of scripts/parity_table.py leaves out keeps its values on the page."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import parity_table
import pytest
from made_parts import with_tables

from testkit.megatron.cases import Case, Outcome

PAGE = Path(__file__).resolve().parents[3] / "docs" / "parity.md"
OLD = with_tables(PAGE, PAGE.read_text())


def write(
    monkeypatch: pytest.MonkeyPatch, page: Path, *flags: str, version: str = "0.19.2", found: str = "0"
) -> tuple[int, str]:
    """The exit code and the page, with its tables, after a run in which every case gives ``found``."""
    outcome = Outcome("ok", grad_difference=float(found))

    def run(cases: list[Case], deadline: float, checkout: str | None) -> dict[Case, str]:
        return {case: parity_table.cell(outcome) for case in cases}

    monkeypatch.setattr(parity_table, "run", run)
    monkeypatch.setattr(parity_table, "run_trainings", lambda cases, checkout: dict.fromkeys(cases, outcome))
    monkeypatch.setattr(parity_table, "version_in", lambda checkout: checkout or version)
    monkeypatch.setattr(importlib.metadata, "version", {"megatron-core": version, "torch": "2.15.0"}.get)
    monkeypatch.setattr(sys, "argv", ["parity_table.py", "--output", str(page), *flags])
    return parity_table.main(), with_tables(page, page.read_text())


@pytest.fixture
def page(tmp_path: Path) -> Path:
    copy = tmp_path / "parity.md"
    copy.write_text(PAGE.read_text())
    shutil.copytree(PAGE.parent / "data", tmp_path / "data")
    return copy


def test_a_run_of_one_engine_changes_nothing_where_its_numbers_are_the_same(
    monkeypatch: pytest.MonkeyPatch, page: Path
) -> None:
    assert write(monkeypatch, page, "--part", "matrix", "--engine", "ours") == (0, OLD)
    assert write(monkeypatch, page, "--part", "matrix", "--engine", "ours", "--pp", "4", "--model", "tied") == (0, OLD)


def test_one_engine_of_one_size_changes_these_cells_alone(monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    code, text = write(
        monkeypatch, page, "--part", "matrix", "--engine", "ours", "--pp", "4", "--model", "tied", found="0.5"
    )
    assert code == 1
    assert text.count("**0.5**") == 96
    assert "| megatron_pp | 384 | 288 | 96 | 0 | 0 |" in text
    assert text.replace("**0.5**", "0").replace("| 288 | 96 |", "| 384 | 0 |") == OLD


def test_a_checkout_adds_columns_of_its_own(monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    code, text = write(monkeypatch, page, "--part", "matrix", "--checkout", "0.99.0+abc", "--only-checkouts")
    assert code == 0
    assert "| megatron_pp 0.99.0 | 384 | 384 | 0 | 0 | 0 |" in text
    assert "| Megatron-core's schedules | 384 | 226 | 8 | 22 | 128 |" in text
    assert "training: Megatron | training: megatron_pp |" in text


def test_the_own_schedules_of_a_checkout_have_a_column_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, page: Path
) -> None:
    given = ("--part", "matrix", "--checkout", "0.99.0+abc", "--only-checkouts", "--own-schedules")
    _, text = write(monkeypatch, page, *given)
    assert "| megatron_pp 0.99.0 | 384 | 384 | 0 | 0 | 0 |" in text
    assert "| Megatron-core 0.99.0's schedules | 384 | 384 | 0 | 0 | 0 |" in text
    assert "training: Megatron 0.99.0" in text


def test_part_of_a_matrix_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    with pytest.raises(SystemExit, match=r"not of megatron-core 0\.17\.0 and torch 2\.15\.0"):
        write(monkeypatch, page, "--part", "matrix", "--engine", "ours", version="0.17.0")
    assert with_tables(page, page.read_text()) == OLD
    _, text = write(monkeypatch, page, "--part", "matrix", version="0.17.0")
    assert "with megatron-core 0.17.0 and" in text
    assert "refused**" not in text, "values of another release do not stay"


def test_trainings_keep_the_columns_of_other_releases(monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    assert write(monkeypatch, page, "--part", "Experts") == (0, OLD)
    code, text = write(monkeypatch, page, "--part", "Experts", "--only-checkouts", "--checkout", "0.99.0", found="0.5")
    assert code == 1
    assert (
        "63 of 84 are equal to the last bit, with megatron-core 0.16.1, 0.20.0+d98e8a64dd, 0.19.2 and 0.99.0." in text
    )
