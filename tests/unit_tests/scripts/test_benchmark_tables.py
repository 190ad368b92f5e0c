"""Tables of docs/performance.md: what several runs hold of one benchmark becomes one table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from benchmarks import tables
from benchmarks.report import BenchmarkError, Report

PAGE = "before\n<!-- table sweep -->\nold\n<!-- end sweep -->\nafter\n"


def write(folder: Path, rounds: int, p: int, columns: list[str] | None = None) -> Path:
    machine = {"cores": 2, "on": f"2026-01-0{p}"}
    rows = [{"P": p, "ms": 1.5 * p}]
    columns = columns or ["P", "ms"]
    Report("sweep", "A sweep", columns, rows, {"rounds": rounds}, ["A note."], machine=machine).write(folder)
    return folder


def run(page: Path, *sources: Path) -> str:
    page.write_text(PAGE)
    tables.run(argparse.Namespace(sources=list(sources), page=page))
    return page.read_text()


def test_two_runs_make_one_table(tmp_path: Path) -> None:
    text = run(tmp_path / "page.md", write(tmp_path / "a", 3, 2), write(tmp_path / "b", 2, 4))
    assert text == (
        "before\n<!-- table sweep -->\n| P | ms |\n| --- | --- |\n| 2 | 3 |\n| 4 | 6 |\n\n"
        "(rounds 3 and 2, cores 2, on 2026-01-02 and 2026-01-04)\n\nA note.\n<!-- end sweep -->\nafter\n"
    )


def test_runs_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", 3, 2), write(tmp_path / "b", 3, 4, ["P", "us"])
    with pytest.raises(BenchmarkError, match="two reports 'sweep' have other columns"):
        run(tmp_path / "page.md", one, other)
    with pytest.raises(BenchmarkError, match=r"holds no \.json; run a subcommand"):
        run(tmp_path / "page.md", one, tmp_path / "empty")
    assert (tmp_path / "page.md").read_text() == PAGE
