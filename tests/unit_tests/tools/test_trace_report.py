"""Conclusions from traces. The trace files are written from simulated steps, so the right results are known exactly."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tools.cli.command_line import main
from megatron_pp.tools.trace_report import write_timeline
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.files import RunHeader, StepRecord, header_line, plan_line, step_line, sync_line
from megatron_pp.tracing.run import load_run

MILLISECOND = 1_000_000
SLOW_LINK = Network(1e6, link=Link(bandwidth=1e6 / 1.5), gloo=True)  # 1.5 ms a message, over gloo


def write_traces(folder, steps, *, skew=0, run="abc", pipeline=None, apart=10**4):
    """Writes the trace files of ranks that run ``steps``.

    A step is a simulation in ms, and begins ``apart`` ms after the step before. The clock of rank r is r * skew ns
    ahead.
    """
    plan = steps[0].plan
    pipeline = pipeline or tuple(range(plan.spec.pipeline_size))
    for rank in range(plan.spec.pipeline_size):
        header = RunHeader(run, rank, pipeline, "cpu", "here")
        ahead = rank * skew
        lines = [header_line(header), sync_line(10**9 + ahead, ahead), plan_line(plan, rank, 1e6)]
        for number, step in enumerate(steps, start=1):
            base = 10**10 + ahead + round(((number - 1) * apart + step.starts[rank][0]) * MILLISECOND)
            shift = step.starts[rank][0]
            starts = [round((t - shift) * MILLISECOND) for t in step.starts[rank]]
            ends = [round((t - shift) * MILLISECOND) for t in step.ends[rank]]
            lines.append(step_line(StepRecord(number, 0, base, starts, ends)))
        (folder / header.file_name).write_text("".join(lines))


def simulated(schedule="1f1b", p=4, v=1, m=8, costs=None, network=SLOW_LINK, **options):
    plan = build_plan(PlanSpec(schedule, p, v, m, **options))
    return simulate(plan, costs or StageCosts.uniform(p * v, 10.0, 10.0, 10.0), network)


@pytest.mark.parametrize("skew", [0, 7 * 10**12])
@pytest.mark.parametrize(
    ("schedule", "v", "options"),
    [
        ("1f1b", 1, {}),
        ("interleaved_1f1b", 2, {}),
        ("interleaved_1f1b", 2, {"policy": "batched"}),
        ("zb_h1", 1, {}),
        ("zb_v", 2, {}),
        ("1f1b", 1, {"variable_shapes": True}),
    ],
)
def test_a_step_comes_back_as_it_was(tmp_path, schedule, v, options, skew):
    step = simulated(schedule, 4, v, 8, **options)
    write_traces(tmp_path, [step], skew=skew)
    found = analyse(load_run(tmp_path))
    measured = found.measured
    assert measured.plan.programs == step.plan.programs
    assert measured.makespan == pytest.approx(step.makespan, abs=1e-3)
    assert measured.busy == pytest.approx(step.busy, abs=1e-2)
    assert measured.bubble_share == pytest.approx(step.bubble_share, abs=1e-4)
    for rank in range(4):
        assert list(measured.starts[rank]) == pytest.approx(list(step.starts[rank]), abs=1e-3)
        assert measured.waits[rank].total == pytest.approx(step.waits[rank].total, abs=1e-2)
        assert measured.waits[rank].peer_late == pytest.approx(step.waits[rank].peer_late, abs=1e-2)
        assert measured.waits[rank].release == pytest.approx(step.waits[rank].release, abs=1e-2)
        assert found.host(rank) == pytest.approx(0.0, abs=1e-2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zb"])
def test_a_rank_that_waits_for_others_to_end_the_step_before_is_not_idle_in_the_next(tmp_path, schedule):
    first, second = (simulated(schedule, v=1 if schedule == "1f1b" else 2) for _ in range(2))
    for rank in range(1, 4):  # the rank continues at once with the wait for its first input
        for times in (second.starts[rank], second.ends[rank][:1]):
            times[0] = first.ends[rank][-1] - first.makespan
        second.starts[rank][1] = second.starts[rank][0]
    write_traces(tmp_path, [first, second], apart=first.makespan, skew=10**9)
    traced = load_run(tmp_path)
    assert traced.began(2) == pytest.approx(first.makespan, abs=1e-3)
    one, other = traced.measured(1), traced.measured(2)
    assert other.makespan == pytest.approx(one.makespan, abs=1e-3)
    assert other.busy == pytest.approx(one.busy, abs=1e-2)
    assert [w.peer_late for w in other.waits] == pytest.approx([w.peer_late for w in one.waits], abs=1e-2)


def test_the_prediction_from_a_run_of_the_simulator_is_that_run(tmp_path):
    """The costs and transfer times found in the traces are those of the simulation, so simulating again gives the same
    step."""
    costs = StageCosts.per_stage([10, 11, 12, 13], [9, 10, 11, 12], [8, 8, 9, 9])
    step = simulated(costs=costs)
    write_traces(tmp_path, [step])
    found = analyse(load_run(tmp_path))
    assert found.costs.forward == pytest.approx(costs.forward)
    assert found.costs.backward == pytest.approx(costs.backward)
    assert found.network.between(0, 1).wire_time(1e6) == pytest.approx(1.5, rel=0.01)
    assert found.predicted.makespan == pytest.approx(step.makespan, rel=0.01)
    assert found.slowest_rank == 3
    assert found.slowest_excess == pytest.approx((13 + 12 + 9) / ((11 + 10 + 8 + 12 + 11 + 9) / 2) - 1)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (0.0, r"took \d+\.\d ms, 0\.0% (more|less) than the predicted \d+\.\d ms slowest"),
        (0.5, r"took \d+\.\d ms, \d\.\d% more than the predicted \d+\.\d ms slowest"),
        (20.0, r"took \d+\.\d ms, \d\d\.\d% more than the predicted \d+\.\d ms; host time explains it, 320\.0 ms"),
        (90.0, r"took \d+\.\d ms, [3-9]\.\d+ times the predicted \d+\.\d ms; host time explains it, 1440\.0 ms"),
    ],
)
def test_host_time_is_named_where_it_explains_the_difference(tmp_path, capsys, host, said):
    """Rank 3, the last one, takes ``host`` ms before each compute, so its events move by the sum of these times."""
    step = simulated()
    late = 0.0
    program = step.plan.timed(3)
    for k, at in enumerate(program):
        late += host if at.op in "FB" else 0.0
        step.starts[3][k] += late
        step.ends[3][k] += late
    write_traces(tmp_path, [step])
    found = analyse(load_run(tmp_path))
    assert found.host(3) == pytest.approx(16 * host, abs=0.1)
    assert main(["report", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(said, printed), printed
    assert "-" not in re.search(r"Step 1, alone.*?Ranks", printed)[0], "no share of something is negative"


def test_halves_are_measured_where_they_ran_and_guessed_where_not(tmp_path):
    costs = StageCosts.uniform(2, 5.0, 4.0, 3.0)
    write_traces(tmp_path, [simulated("zb_h1", 2, 1, 6, costs)])
    found = analyse(load_run(tmp_path)).costs
    assert (found.backward_input[0], found.weight[0], found.backward[0]) == pytest.approx((4.0, 3.0, 7.0))
    write_traces(tmp_path, [simulated("1f1b", 2, 1, 6, costs)])
    found = analyse(load_run(tmp_path)).costs
    assert (found.backward_input[0], found.weight[0], found.backward[0]) == pytest.approx((3.5, 3.5, 7.0))


def test_the_median_step_is_shown(tmp_path):
    speeds = [10.0, 30.0, 11.0]
    steps = [simulated(costs=StageCosts.uniform(4, s, s, s)) for s in speeds]
    write_traces(tmp_path, steps)
    found = analyse(load_run(tmp_path))
    assert (found.step, found.steps) == (3, 3)
    assert found.costs.forward[0] == pytest.approx(11.0)
    assert analyse(load_run(tmp_path), 2).measured.makespan == pytest.approx(steps[1].makespan, abs=1e-3)


def test_overlap_is_what_no_rank_waited_for(tmp_path):
    hidden = simulated("gpipe", 2, 1, 16, network=Network(1e6, link=Link(bandwidth=1e6 / 5)))
    write_traces(tmp_path, [hidden])
    much = analyse(load_run(tmp_path)).overlap
    exposed = simulated("gpipe", 2, 1, 16, network=Network(1e6, link=Link(bandwidth=1e6 / 5)), policy="plain")
    write_traces(tmp_path, [exposed])
    little = analyse(load_run(tmp_path)).overlap
    assert little < 0.5 < much


def test_clocks_that_drift_are_put_right_between_two_comparisons(tmp_path):
    step = simulated(p=2)
    write_traces(tmp_path, [step])
    path = next(tmp_path.glob("*rank00001*"))
    lines = path.read_text().splitlines()
    record = json.loads(lines[3])
    # This clock was 1 ms ahead at 9 s and 3 ms ahead at 11 s, so it was 2 ms ahead at 10 s, the time of the step.
    record["base"] += 2 * MILLISECOND
    lines[1:4] = [
        sync_line(9 * 10**9, MILLISECOND),
        sync_line(11 * 10**9, 3 * MILLISECOND),
        lines[2],
        json.dumps(record),
    ]
    path.write_text("\n".join(line.strip() for line in lines) + "\n")
    measured = load_run(tmp_path).measured(1)
    assert measured.makespan == pytest.approx(step.makespan, abs=0.1)


def test_replicas_of_the_pipeline_are_kept_apart(tmp_path):
    fast, slow = simulated(p=2), simulated(p=2, costs=StageCosts.uniform(2, 20.0, 20.0, 20.0))
    write_traces(tmp_path, [fast], pipeline=(0, 2))
    write_traces(tmp_path, [slow], pipeline=(1, 3))
    assert analyse(load_run(tmp_path, rank=0)).measured.makespan == pytest.approx(fast.makespan, abs=1e-3)
    assert analyse(load_run(tmp_path, rank=3)).measured.makespan == pytest.approx(slow.makespan, abs=1e-3)


def test_the_report_prints_and_draws_the_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    costs = StageCosts.per_stage([10, 10, 20, 10], [10, 10, 20, 10], [10, 10, 20, 10])
    write_traces(tmp_path, [simulated(costs=costs)])
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "slowest rank: 2 computes 480.0 ms, 100.0% more than the median rank" in out
    assert "overlap: " in out
    assert "with these costs the predicted step is within " in out
    page = (tmp_path / "report.html").read_text()
    assert page.count("<canvas") == 2
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_of_a_run_is_titled_with_schedule_sizes_and_date(tmp_path):
    name = f"{1_763_000_000_000_000 << 12:x}"  # 2025-11-13 02:13:20 UTC
    for run, date in ((name, " of 2025-11-13 02:13 UTC"), ("abc", "")):
        folder = tmp_path / run
        folder.mkdir()
        write_traces(folder, [simulated("zb_v", 2, 2, 4)], run=run)
        write_timeline(folder, folder / "timeline.html", folder / "timeline.json")
        page = (folder / "timeline.html").read_text()
        assert f"<title>zb_v P=2 V=2 M=4, run {run}{date}</title>" in page
        assert f"<h1>zb_v P=2 V=2 M=4, run {run}{date}</h1>" in page
        titles = ["measured, step 1: zb_v P=2 V=2 M=4", "predicted from the plan and the measured costs"]
        assert [title for title in titles if f"<h2>{title} " in page] == titles


def test_simulate_and_draw_take_measured_values(tmp_path, capsys):
    step = simulated()
    write_traces(tmp_path, [step])
    assert main(["simulate", "--from-trace", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(step.makespan, rel=0.01)
    assert main(["simulate", "--from-trace", str(tmp_path), "--compare", "gpipe,zb_h1", "-P", "4", "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)
    assert {c["schedule"] for c in ranked} == {"gpipe", "zb_h1"}
    assert all(c["makespan"] > 8 * 30 for c in ranked)
    assert main(["draw", "--from-trace", str(tmp_path), "-o", str(tmp_path / "a.svg")]) == 0
    assert "as measured" in (tmp_path / "a.svg").read_text()


def test_rules_of_a_device_that_are_given_beside_a_trace_on_gloo_are_not_dropped(tmp_path, capsys):
    """Without such rules, plans are made for gloo, which has no device."""
    write_traces(tmp_path, [simulated()])
    for line in ("simulate -s zb_h1 -P 4 -M 8", "advise --memory-gb 80 --global-batch 8 --jobs 1 --schedules 1f1b"):
        words = [*line.split(), "--from-trace", str(tmp_path)]
        assert main(words) == 0
        assert main([*words, "--device", "one_queue"]) != 0
        assert "gloo's transfers wait for no device" in "".join(capsys.readouterr())


def test_a_hidden_transfer_takes_no_more_than_there_was_time(tmp_path):
    """If no rank waited for a transfer, only its latest possible end is known."""
    step = simulated("gpipe", 2, 1, 8, network=Network(1e6, link=Link(bandwidth=1e6 / 9)))
    write_traces(tmp_path, [step])
    for t in load_run(tmp_path).measured(1).transfers:
        used = next(
            e for e in dataclasses.replace(step).events(t.target) if str(e.instruction) == f"WAIT_{t.kind}0.{t.mb}"
        )
        assert t.end <= used.end + 1e-3
