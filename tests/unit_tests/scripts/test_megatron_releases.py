"""docs/data/megatron_releases.csv: one row for each release, of its last run, and what is said of it."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import megatron_releases
import pytest

JUNIT = """<testsuites><testsuite tests="9" skipped="2" failures="{failures}" errors="1"/></testsuites>"""


def written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, failures: int, *flags: str
) -> tuple[int, list[list[str]]]:
    """The exit code, and the table, after a run."""
    folder = tmp_path / release / "megatron" / "core" / "pipeline_parallel"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedules.py").write_text("def get_tensor_shapes(*, config):\n    return [()]\n")
    (tmp_path / "tests.xml").write_text(JUNIT.format(failures=failures))
    table = tmp_path / "releases.csv"
    given = [release, "--package", str(tmp_path / release), "--tests", str(tmp_path / "tests.xml"), "--csv", str(table)]
    monkeypatch.setattr(sys, "argv", ["megatron_releases.py", *given, *flags])
    monkeypatch.setattr(megatron_releases, "parity_under", lambda flags: ("96", "95"))
    return megatron_releases.main(), list(csv.reader(table.read_text().splitlines()))


def test_a_release_has_one_row_and_branches_are_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for release in ("main d98e8a64", "0.19.2", "0.9.0", "0.19.10"):
        written(monkeypatch, tmp_path, release, 0)
    code, (head, *rows) = written(monkeypatch, tmp_path, "0.19.2", 3)
    assert code == 1
    assert [row[0] for row in rows] == ["0.9.0", "0.19.2", "0.19.10", "main d98e8a64"]
    second = dict(zip(head, rows[1], strict=True))
    assert (second["tests passed"], second["tests skipped"], second["tests failed"]) == ("3", "2", "4")
    assert (second["cases"], second["differs"]) == ("-", "get_tensor_shapes")


def test_the_script_says_what_to_do_with_a_new_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (_, row) = written(monkeypatch, tmp_path, "0.21.0", 0, "--parity=--pp 2")
    assert (code, row[7:9]) == (1, ["96", "95"])
    said = " ".join(capsys.readouterr().out.split())
    assert "megatron-core 0.21.0 is not shown to run correctly: 6 tests of the plug-in pass and 1 fail, and" in said
    assert "95 of 96 cases are equal to one process. Use an earlier release" in said
    assert "It differs from all known releases in get_tensor_shapes" in said


def row_of(release: str, passed: str) -> megatron_releases.Row:
    return megatron_releases.Row(release, "3.12.1", "2.15.0", "2026-11-28", passed, "2", "0", "96", "96", "-")


def test_a_release_that_runs_can_be_taken_up() -> None:
    said = " ".join(megatron_releases.advice(row_of("0.21.0", "6")).split())
    assert "runs correctly: 6 tests of the plug-in pass and 0 fail, and 96 of 96 cases are equal" in said
    assert "pin it in scripts/constraints.txt" in said
    assert "differs" not in said


def test_a_release_that_is_pinned_already_is_reported() -> None:
    pinned = next(line for line in megatron_releases.CONSTRAINTS.read_text().splitlines() if "megatron-core==" in line)
    release = pinned.partition("==")[2].partition(";")[0]
    said = " ".join(megatron_releases.advice(row_of(release, "6")).split())
    assert said.endswith("The constraints already pin it.")


def test_without_tests_nothing_is_shown() -> None:
    assert not megatron_releases.runs(row_of("0.21.0", "0"))
    assert "is not shown to run" in megatron_releases.advice(row_of("0.21.0", "0"))
