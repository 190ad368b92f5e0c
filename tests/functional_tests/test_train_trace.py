"""``--trace`` of the training script: the timeline of the chosen steps lies beside the metrics, whole and readable."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.gpt.program import WRITTEN
from megatron_pp.plan.costs.measured import measured_values
from megatron_pp.plan.ir.instruction import COMPUTE_OPS, FREE_OPS, WAIT_OPS
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.run import TracedRun, load_run
from tests.functional_tests.test_train_script import INTERLEAVED, SHORT
from tests.harness.training_ranks import train

RANKS = 2


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of four steps, of which the second and the last are traced, and two are measured."""
    folder = tmp_path_factory.mktemp("traced")
    flags = [*SHORT, *INTERLEAVED, "--train-steps", "4", "--eval-interval", "0", "--trace", "2,4", "--run-dir", "run"]
    flags += ["--measure", "2"]
    return folder / "run", train(RANKS, folder, flags)


def test_the_run_says_where_to_open_the_timeline(traced: tuple[Path, str]) -> None:
    folder, output = traced
    (line,) = [line for line in output.splitlines() if line.startswith("timeline of steps")]
    for part in ("steps 2, 4: open run/timeline.html", "run/timeline.json at https://ui.perfetto.dev", "run/traces"):
        assert part in line
    names = {path.name for path in folder.iterdir()}
    assert {"metrics.jsonl", "timeline.html", "timeline.json", "traces"} <= names <= {*WRITTEN}
    (file, _) = sorted((folder / "traces").glob("*.jsonl"))
    (plan,) = [json.loads(line) for line in file.read_text().splitlines() if '"kind":"plan"' in line]
    assert f"order; programs {plan['certificate']['digest']}" in (folder / "log.txt").read_text()
    assert "certificate:" not in output


def test_what_the_stages_cost_is_in_the_runs_folder(traced: tuple[Path, str]) -> None:
    folder, _ = traced
    assert "measured over 2 steps: times of 4 stages" in (folder / "log.txt").read_text()
    measured = measured_values(str(folder / "megatron_pp_measured.json"))
    assert measured is not None
    assert measured.memory(Placement("loop", RANKS, 2)).forward[0] > 0
    recorded = analyse(load_run(folder / "traces"), 2).costs  # milliseconds
    for ours, theirs in ((measured.forward, recorded.forward), (measured.backward, recorded.backward)):
        assert isinstance(ours, tuple)
        for seconds, milliseconds in zip(ours, theirs, strict=True):
            assert milliseconds / 10 < 1e3 * seconds < milliseconds * 10


def test_the_chosen_steps_alone_are_recorded_with_every_instruction(traced: tuple[Path, str]) -> None:
    recorded = load_run(traced[0] / "traces")
    assert recorded.steps == (2, 4)
    assert recorded.began(4) > recorded.measured(2).makespan
    for step in recorded.steps:
        assert len(recorded.plan(step).programs) == RANKS
        for trace, program in zip(recorded.ranks, recorded.plan(step).programs, strict=True):
            assert len(trace.steps[step].starts) == len(trace.steps[step].ends) == len(program) > 0


def test_the_chrome_trace_has_every_compute_and_wait_of_both_steps(traced: tuple[Path, str]) -> None:
    recorded, text = load_run(traced[0] / "traces"), (traced[0] / "timeline.json").read_text()
    spans = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    for rank in range(RANKS):
        names = [[e["name"] for e in spans if (e["pid"], e["tid"]) == (rank, thread)] for thread in (0, 1)]
        assert names == [expected(recorded, rank, COMPUTE_OPS), expected(recorded, rank, {*WAIT_OPS, *FREE_OPS})]
        steps = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (rank, 6)}
        assert list(steps) == ["step 2", "step 4"]
        half = len(names[0]) // 2
        blocks = [e for e in spans if (e["pid"], e["tid"]) == (rank, 0)]
        for name, part in (("step 2", blocks[:half]), ("step 4", blocks[half:])):
            begin, end = steps[name]
            assert all(begin <= e["ts"] and e["ts"] + e["dur"] <= end + 1e-3 for e in part)


def test_the_page_has_every_compute_of_both_steps_and_the_prediction(traced: tuple[Path, str]) -> None:
    recorded, page = load_run(traced[0] / "traces"), (traced[0] / "timeline.html").read_text()
    head = json.loads(found(r'id="head">(.*?)</script>', page))
    gzip.decompress(base64.b64decode(found(r'id="columns">(.*?)</script>', page)))
    assert [t["title"].split(":")[0] for t in head["timelines"]] == [
        "measured, step 2",
        "measured, step 4",
        "predicted from the plan and the measured costs",
    ]
    for timeline in head["timelines"]:
        for rank, lane in enumerate(timeline["lanes"]):
            assert lane["compute"]["codes"][1] == len(expected(recorded, rank, COMPUTE_OPS)) // 2


def expected(recorded: TracedRun, rank: int, ops: Any) -> list[str]:
    """The instructions of ``rank`` in both steps, as printed."""
    return [str(at) for step in recorded.steps for at in recorded.plan(step).programs[rank] if at.op in ops]


def found(pattern: str, page: str) -> str:
    match = re.search(pattern, page, re.DOTALL)
    assert match is not None
    return match.group(1)
