"""``--trace`` of the training script writes the whole timeline of the chosen steps next to the metrics, readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.gpt.program import WRITTEN
from megatron_pp.plan.costs.measured import measured_values
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.run import TracedRun, load_run
from testkit.training_ranks import train
from tests.functional_tests.test_train_script import INTERLEAVED, SHORT

RANKS = 2


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, TracedRun]:
    """Take four steps, trace the second and last, measure two. Return the folder, the output and the recorded trace."""
    folder = tmp_path_factory.mktemp("traced")
    flags = [*SHORT, *INTERLEAVED, "--train-steps", "4", "--eval-interval", "0", "--trace", "2,4", "--run-dir", "run"]
    output = train(RANKS, folder, [*flags, "--measure", "2"])
    return folder / "run", output, load_run(folder / "run" / "traces")


def test_the_run_says_where_to_open_the_timeline(traced: tuple[Path, str, TracedRun]) -> None:
    folder, output, _ = traced
    (line,) = [line for line in output.splitlines() if line.startswith("timeline of steps")]
    for part in ("steps 2, 4: open run/timeline.html", "run/timeline.json at https://ui.perfetto.dev", "run/traces"):
        assert part in line
    names = {path.name for path in folder.iterdir()}
    assert {"metrics.jsonl", "timeline.html", "timeline.json", "traces"} <= names <= {*WRITTEN}
    (file, _) = sorted((folder / "traces").glob("*.jsonl"))
    (plan,) = [json.loads(line) for line in file.read_text().splitlines() if '"kind":"plan"' in line]
    assert f"order; programs {plan['certificate']['digest']}" in (folder / "log.txt").read_text()
    assert "certificate:" not in output


def test_measured_stage_costs_are_written_to_the_runs_folder(traced: tuple[Path, str, TracedRun]) -> None:
    folder, _, run = traced
    assert "measured over 2 steps: times of 4 stages" in (folder / "log.txt").read_text()
    measured, recorded = measured_values(str(folder / "megatron_pp_measured.json")), analyse(run, 2).costs
    assert measured is not None
    assert measured.memory(Placement("loop", RANKS, 2)).forward[0] > 0
    for ours, theirs in ((measured.forward, recorded.forward), (measured.backward, recorded.backward)):
        assert isinstance(ours, tuple)
        for seconds, milliseconds in zip(ours, theirs, strict=True):
            assert milliseconds / 10 < 1e3 * seconds < milliseconds * 10


def test_the_chosen_steps_alone_are_recorded_and_drawn(traced: tuple[Path, str, TracedRun]) -> None:
    folder, _, recorded = traced
    assert recorded.steps == (2, 4)
    for step in recorded.steps:
        assert len(recorded.plan(step).programs) == RANKS
        for trace, program in zip(recorded.ranks, recorded.plan(step).programs, strict=True):
            assert len(trace.steps[step].starts) == len(trace.steps[step].ends) == len(program) > 0
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] in ("step 2", "step 4")} == set(range(RANKS))
    page = (folder / "timeline.html").read_text()
    for title in ("measured, step 2", "measured, step 4", "predicted from the plan and the measured costs"):
        assert title in page
