"""docs/performance.md: what runs hold of one benchmark becomes one chart, one paragraph and one data file."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_parts import read_data

from benchmarks import tables
from benchmarks.all import PARTS
from benchmarks.report import BenchmarkError, Report

PAGE = "before\n<!-- table sweep -->\nold\n<!-- end sweep -->\nafter\n"
TRACING = [{"setting": "1f1b P=2", "off us": 3.0, "on us": 5.0, "added us": 2.0, "share": 0.0002}]


def write(folder: Path, rounds: int, p: int, columns: list[str] | None = None) -> Path:
    machine = {"cores": 2, "on": f"2026-01-0{p}"}
    rows = [{"P": p, "ms": 1.5 * p}]
    columns = columns or ["P", "ms"]
    Report("sweep", "A sweep", rows, {"rounds": rounds}, ["A note."], columns, machine).write(folder)
    return folder


def run(page: Path, *sources: Path, text: str = PAGE) -> str:
    page.write_text(text)
    tables.run(argparse.Namespace(sources=list(sources), page=page))
    return page.read_text()


def test_two_runs_make_one_table(tmp_path: Path) -> None:
    text = run(tmp_path / "page.md", write(tmp_path / "a", 3, 2), write(tmp_path / "b", 2, 4))
    assert text == (
        "before\n<!-- table sweep -->\n[Table: A sweep](data/performance_sweep.csv)\n<!-- end sweep -->\nafter\n"
    )
    assert (tmp_path / "data" / "performance_sweep.csv").read_text() == "P,ms\n2,3\n4,6\n"
    _, (name, measured, notes) = read_data(tmp_path / "page.md", tables.RUNS)
    assert (name, notes) == ("sweep", "A note.")
    assert measured == "rounds 3 and 2, cores 2, on 2026-01-02 and 2026-01-04"


def test_a_run_of_one_benchmark_keeps_what_the_others_were_measured_with(tmp_path: Path) -> None:
    run(tmp_path / "page.md", write(tmp_path / "a", 3, 2))
    Report("tracing", "A trace", TRACING, {"compute ms": 10.0}).write(tmp_path / "b")
    run(tmp_path / "page.md", tmp_path / "b", text=PAGE.replace("sweep", "tracing"))
    assert [row[0] for row in read_data(tmp_path / "page.md", tables.RUNS)] == ["table", "sweep", "tracing"]


def test_a_benchmark_with_a_chart_and_a_reading(tmp_path: Path) -> None:
    columns = ["setting", "off us", "on us", "added us", "share"]
    Report("tracing", "A trace", TRACING, {"compute ms": 10.0}, columns=columns).write(tmp_path / "a")
    text = run(tmp_path / "page.md", tmp_path / "a", text=PAGE.replace("sweep", "tracing"))
    chart, reading, table = text.split("\n\n")[:3]
    assert chart.endswith("![A trace](charts/tracing.svg)")
    assert reading == "Recording adds 2 us to each virtual microbatch. This is 0.02% of 10 ms of compute."
    assert table.startswith("[Table: A trace](data/performance_tracing.csv)\n")
    assert (tmp_path / "charts" / "tracing.svg").exists()


def test_runs_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", 3, 2), write(tmp_path / "b", 3, 4, ["P", "us"])
    with pytest.raises(BenchmarkError, match="two reports 'sweep' have different columns"):
        run(tmp_path / "page.md", one, other)
    with pytest.raises(BenchmarkError, match=r"holds no \.json; run a subcommand"):
        run(tmp_path / "page.md", one, tmp_path / "empty")
    assert (tmp_path / "page.md").read_text() == PAGE


def test_the_page_has_a_place_for_every_benchmark_and_its_charts_exist() -> None:
    text = tables.PAGE.read_text()
    assert re.findall(r"<!-- table (\w+) -->", text) == re.findall(r"<!-- end (\w+) -->", text)
    places = {*PARTS, "instructions"}  # which are counted apart, as that needs valgrind
    assert set(re.findall(r"<!-- table (\w+) -->", text)) == places
    measured = {row[0] for row in read_data(tables.PAGE, tables.RUNS)}
    assert measured == {"table", *places} - {"gpu"}, "no GPU was at hand"
    charts = re.findall(r"\]\((charts/\w+\.svg)\)", text)
    assert len(charts) == len(PARTS) - 3  # slices and vocabulary have none, and no GPU was at hand
    for chart in charts:
        ElementTree.parse(tables.PAGE.parent / chart)
