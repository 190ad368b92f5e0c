"""Benchmarks on real processes, as small as can be: they run, and their reports hold what tables and charts need."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.functional_tests.megatron_support import SCRIPTS, needs_megatron

sys.path.insert(0, str(SCRIPTS))

with patch.dict(os.environ):  # the program sets up its own process
    import benchmark

pytestmark = pytest.mark.usefixtures("fork_server")
SMALL = ("--forward-ms", "2")
FEW = ("--rounds", "1", "--microbatches", "4")


def report(folder: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """The rows of one run."""
    assert benchmark.main([name, *SMALL, *options, "--timeout", "240", "--out", str(folder)]) == 0
    rows: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    return rows


def test_bubbles_of_schedules_with_and_without_a_split_backward(tmp_path: Path) -> None:
    lengths = ("--backward-ms", "2", "--weight-ms", "2")
    rows = report(tmp_path, "bubble", *FEW, "--pp", "2", "--schedules", "1f1b", "zb_h1", "zb_v", *lengths)
    assert [row["schedule"] for row in rows] == ["1f1b", "zb_h1", "zb_v"]
    assert all(row["step over simulated"] > 1 for row in rows)  # a sleep is never too short


def test_packed_steps_of_public_lengths_planned_and_in_fixed_order(tmp_path: Path) -> None:
    asked = ("--pp", "2", "--steps", "1", "--sequences", "24", "--lengths", "mooncake", "--schedules", "1f1b")
    rows = report(tmp_path, "packing", *asked)
    assert [row["W put off"] for row in rows] == ["no", "yes"]
    assert all(0 < row["simulated planned / fixed"] <= 1 < row["longest"] for row in rows)
    # A sleep is never too short.
    assert all(row[f"{order} ms"] > row[f"simulated {order} ms"] for row in rows for order in ("fixed", "planned"))


@needs_megatron
def test_bubbles_on_megatrons_gpt_model(tmp_path: Path) -> None:
    rows = report(tmp_path, "megatron_bubble", *FEW, "--pp", "2", "--backward-ms", "2", "--weight-ms", "2")
    assert [row["schedule"] for row in rows] == ["1f1b", "zb_h1", "interleaved_1f1b", "interleaved_zb"]
    assert all(0 < row["simulated, own times"] < 1 for row in rows)


@needs_megatron
def test_steps_of_megatrons_gpt_model_under_both_engines(tmp_path: Path) -> None:
    rows = report(tmp_path, "megatron_steps", *FEW, "--pp", "2", "--backward-ms", "4", "--policies", "overlap")
    assert [(row["schedule"], row["shapes"]) for row in rows] == [
        *((schedule, shapes) for schedule in ("1f1b", "interleaved_1f1b") for shapes in ("fixed", "variable")),
        *(("zb_h1", "fixed"), ("interleaved_zb", "fixed")),
    ]
    assert all(min(row["megatron ms"], row["ours / simulated"] * 24) > 24 for row in rows)  # 4 forwards and backwards


@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
def test_what_safety_costs_on_shaped_links(tmp_path: Path) -> None:
    rows = report(tmp_path, "overlap", *FEW, "--pp", "2", "--megabytes", "0.25", "--schedules", "1f1b")
    assert [row["variant"] for row in rows] == ["free at once", "wait at once", "ours"]
    assert all(row["exposed ms"] > 0 and row["peak MB"] > 0 for row in rows)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
def test_steps_of_sharded_stages_beside_torchs_on_shaped_links(tmp_path: Path) -> None:
    rows = report(tmp_path, "sharded", *FEW, "--pp", "2", "--chunks", "2", "--ratios", "0.5")
    assert [row["engine"] for row in rows][:2] == ["ours", "torch"]
    # A sleep is never too short: 8 forwards, and 8 backwards of twice the length.
    assert all(row["ms (median)"] > 48 and row["bound ms"] > 48 for row in rows)
