"""Recording with ranks as threads: what is in the files, whose clock it is on, and how bad files are refused."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from megatron_pp.config.conversions import chosen_steps
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import FileFormatError, ScheduleInputError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData
from megatron_pp.tracing import recorder as trace
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.clock_sync import agree_on_clocks
from megatron_pp.tracing.observers import message_bytes, nested
from megatron_pp.tracing.recorder import Tracer
from megatron_pp.tracing.run import load_run
from megatron_pp.weight_grad import split_weight_grad
from testkit.thread_runs.step_runs import pipeline

HOUR = 3_600_000_000_000  # nanoseconds


def train(
    size, steps, folder, *, num_chunks=1, data=None, forward_only=False, model_of=ToyBlock, around=None, **fields
):
    """``steps`` calls of the schedule on the toy model, ranks as threads; those of rank 0 within ``around``."""

    def rank_main(rank):
        chunks = rank.model(model_of)

        def one_step():
            rank.step(chunks, forward_only=forward_only)

        for _ in range(steps):
            one_step() if around is None or rank.rank > 0 else around(one_step)

    pipeline(size, num_chunks, 4, rank_main, data=data, trace_dir=folder, **fields)


# --- what is recorded


def test_nothing_is_recorded_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(2, 3, None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("converted", [0, 1])
def test_ranks_with_and_without_a_model_that_splits_are_one_run(tmp_path, converted):
    ranks = iter(range(2))

    def prepare(chunks):
        if next(ranks) == converted:
            split_weight_grad(chunks)

    traced = {"trace_dir": str(tmp_path / "t"), "trace_steps": "1", "overlap_p2p_comm": True}
    run_in_threads(2, 1, ToyData(4), prepare=prepare, pipeline_schedule="zb_h1", **traced)
    run = load_run(tmp_path / "t")
    verify(run.plan(1))
    assert sum("W0.0" in str(program) for program in run.plan(1).programs) == 1
    assert analyse(run, 1)


@pytest.mark.parametrize(("num_chunks", "overlap"), [(1, True), (1, False), (2, True), (2, False)])
def test_every_instruction_of_the_chosen_steps_is_in_the_files(tmp_path, num_chunks, overlap):
    train(2, 5, str(tmp_path / "t"), num_chunks=num_chunks, trace_steps="2,4-5", overlap_p2p_comm=overlap)
    run = load_run(tmp_path / "t")
    assert run.steps == (2, 4, 5)
    plan = run.plan(4)
    assert plan.programs == build_plan(plan.spec).programs
    for step in run.steps:
        measured = run.measured(step)
        for rank, program in enumerate(plan.programs):
            starts, ends = measured.starts[rank], measured.ends[rank]
            assert len(starts) == len(ends) == len(program)
            assert all(a <= b for a, b in zip(starts, ends, strict=True))
            assert all(a <= b for a, b in zip(ends, starts[1:], strict=False))
        assert min(s[0] for s in measured.starts) == 0.0


def test_the_environment_switches_it_on_and_evaluation_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_PP_TRACE_DIR", str(tmp_path / "t"))
    monkeypatch.setenv("MEGATRON_PP_TRACE_STEPS", "1-2")
    train(2, 3, None, forward_only=True)
    assert not (tmp_path / "t").exists()
    train(2, 3, None)
    assert load_run(tmp_path / "t").steps == (1, 2)


def test_steps_are_counted_on_after_a_resume(tmp_path):
    config = SimpleNamespace(trace_dir=str(tmp_path), trace_steps="11", trace_first_step=10)
    settings = StepSettings.from_config(config)
    plan, transport = build_plan(PlanSpec("gpipe", 1, 1, 1)), MemoryNetwork(1).transport(0)
    chunks = SimpleNamespace(chunks=[torch.nn.Linear(1, 1)])
    step = SimpleNamespace(inputs=chunks, settings=settings, communicator=SimpleNamespace(transport=transport))
    assert not trace.step_observer(step).observers(step, plan, 0.0)
    (recording,) = trace.step_observer(step).observers(step, plan, 0.0)
    recording.start()
    for at in plan.programs[0]:
        recording.begin(at)
        recording.end(at)
    recording.finish()
    assert load_run(tmp_path).steps == (11,)


def test_compute_has_the_length_it_had(tmp_path):
    """Forwards that sleep 20 ms, or 40: no less is recorded."""

    class Sleepy(ToyBlock):
        def __init__(self, stage):
            super().__init__(stage)
            self.seconds = 0.04 if stage == 1 else 0.02

        def forward(self, x):
            time.sleep(self.seconds)
            return super().forward(x)

    train(2, 2, str(tmp_path), trace_steps="2", model_of=Sleepy, overlap_p2p_comm=True)
    found = analyse(load_run(tmp_path))
    assert found.costs.forward[0] >= 20
    assert found.costs.forward[1] >= 40
    assert found.measured.makespan >= 4 * 40 + 20
    assert found.measured.busy[1] >= 4 * 40


def test_measured_transfers_are_the_plans_messages(tmp_path):
    train(2, 2, str(tmp_path), num_chunks=2, trace_steps="2", overlap_p2p_comm=True)
    measured = load_run(tmp_path).measured(2)
    data = ToyData(4)
    size = 4 * data.seq_length * data.micro_batch_size * data.hidden
    # 3 edges between 4 stages: 2 from rank 0, 1 from rank 1; gradients the other way.
    assert measured.volume() == {(0, 1): (4 * 3, 12.0 * size), (1, 0): (4 * 3, 12.0 * size)}
    for t in measured.transfers:
        assert max(t.send_posted, t.receive_posted) == t.ready <= t.start <= t.end


# --- one clock


class Skewed:
    """A clock that is off."""

    def __init__(self, offset):
        self.offset = offset

    def __call__(self):
        return time.perf_counter_ns() + self.offset


def test_clocks_are_compared_and_what_rank_0_chose_is_passed_on():
    network = MemoryNetwork(4)
    offsets = [0, HOUR, -HOUR, 17]
    agreed = run_ranks(4, lambda r: agree_on_clocks(network.transport(r), Skewed(offsets[r]), run=99 if r == 0 else 0))
    assert [a.run for a in agreed] == [99] * 4
    for rank in (1, 2):
        assert agreed[rank].ahead == pytest.approx(offsets[rank], abs=20_000_000)
    assert agreed[0].ahead == 0


def test_one_machine_has_one_clock():
    """Differences below the round trip are noise between processes of one machine."""
    network = MemoryNetwork(2)
    agreed = run_ranks(2, lambda r: agree_on_clocks(network.transport(r), Skewed(0)))
    assert [a.ahead for a in agreed] == [0, 0]


def test_offsets_are_removed_from_the_merged_timeline(tmp_path, monkeypatch):
    """Rank 1's clock is an hour ahead; in the merged step it still receives after rank 0 has sent."""
    original = Tracer.__init__

    def skewed(self, folder, steps, transport, first_step=1):
        original(self, folder, steps, transport, first_step)
        self.clock = Skewed(HOUR * transport.rank)

    monkeypatch.setattr(Tracer, "__init__", skewed)
    train(2, 2, str(tmp_path), trace_steps="1-2", overlap_p2p_comm=True)
    run = load_run(tmp_path)
    assert abs(run.ranks[1].syncs[0][1] - HOUR) < 1_000_000_000
    for step in run.steps:
        assert run.measured(step).makespan < 10_000
    first = next(t for t in run.measured(2).transfers if t.kind == "F")
    received = next(e for e in run.measured(2).events(1) if str(e.instruction) == "WAIT_F0.0")
    assert received.end >= first.send_posted - 50


# --- trouble


def test_a_disk_that_fails_ends_the_trace_not_the_training(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    train(2, 3, str(tmp_path / "file"), trace_steps="1-3")
    assert [r.message for r in caplog.records if "tracing stops" in r.message]


def test_a_step_that_raises_is_not_written(tmp_path):
    class Failing(ToyBlock):
        calls = threading.local()

        def forward(self, x):
            self.calls.n = getattr(self.calls, "n", 0) + 1
            if self.calls.n > 6:
                raise ValueError("of the model")
            return super().forward(x)

    with pytest.raises((ValueError, RuntimeError)):
        train(2, 3, str(tmp_path), trace_steps="1-3", model_of=Failing)
    assert load_run(tmp_path).steps == (1,)


@pytest.mark.parametrize("text", ["", "a", "1-", "-3", "5-2", "1,,2", "1.5"])
def test_bad_lists_of_steps_are_refused(text):
    with pytest.raises(ScheduleInputError, match="it must list steps, as in 3,10-12"):
        chosen_steps(text)


def test_message_bytes_counts_all_tensors_of_a_message():
    assert message_bytes((2, 3, 4), torch.bfloat16) == 48
    assert message_bytes([(2, 3), (4,)], torch.float32) == 40
    assert message_bytes([None], torch.float32) == message_bytes((2,), None) == 0


def test_observers_are_nested():
    calls = []

    def watcher(name):
        return SimpleNamespace(begin=lambda at: calls.append(f"{name}<"), end=lambda at: calls.append(f">{name}"))

    both = nested(watcher("a"), None, watcher("b"))
    both.begin(None)
    both.end(None)
    assert calls == ["a<", "b<", ">b", ">a"]
    assert nested(None, None) is None


def test_a_profiled_step_can_be_recorded_too(tmp_path):
    """Both see every instruction; the recording's time is the whole of it, the profiler's work included."""
    names = []

    def in_profiler(step):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        names.extend(event.name for event in sorted(profile.events(), key=lambda e: e.time_range.start))

    train(2, 2, str(tmp_path), trace_steps="2", overlap_p2p_comm=True, around=in_profiler)
    run = load_run(tmp_path)
    program = [str(at) for at in run.plan(2).programs[0]]
    assert [name for name in names if name in set(program)] == program * 2
    assert len(run.ranks[0].steps[2].ends) == len(program)


@pytest.fixture
def recorded(tmp_path):
    train(2, 3, str(tmp_path), trace_steps="1-3", overlap_p2p_comm=True)
    return tmp_path


def rank_file(folder, rank):
    return next(folder.glob(f"*rank{rank:05d}.jsonl"))


def test_a_missing_rank_is_named(recorded):
    rank_file(recorded, 1).unlink()
    with pytest.raises(FileFormatError, match=r"the trace of rank 1 is missing \(trace-.*-rank00001.jsonl\)"):
        load_run(recorded)


def test_traces_of_different_runs_are_not_mixed(recorded):
    train(2, 1, str(recorded), trace_steps="1")
    with pytest.raises(FileFormatError, match=r"traces of 2 runs: .*, .*; choose one with --run"):
        load_run(recorded)
    runs = sorted({p.name.split("-")[1] for p in recorded.glob("*.jsonl")})
    assert [load_run(recorded, run).steps for run in runs] == [(1, 2, 3), (1,)]
    with pytest.raises(FileFormatError, match="there is no run 'x'"):
        load_run(recorded, "x")


def test_a_file_of_another_run_under_this_ones_name_is_found(recorded):
    path = rank_file(recorded, 1)
    text = path.read_text()
    run = path.name.split("-")[1]
    path.write_text(text.replace(run, "0ther", 1))
    with pytest.raises(FileFormatError, match=f"{path.name}: this is a trace of run 0ther, under another one's name"):
        load_run(recorded)


def test_a_line_that_a_killed_run_left_is_ignored(recorded):
    path = rank_file(recorded, 0)
    path.write_text(path.read_text()[:-30])
    assert load_run(recorded).steps == (1, 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: "", "the file is empty"),
        (lambda t: t[:40], "cut off in its first line"),
        (lambda t: t.replace('"megatron_pp.trace"', '"other"'), "line 1: no trace of format megatron_pp.trace"),
        (lambda t: t.replace('"version":2', '"version":3'), "line 1: no trace of format .* version 2$"),
        (lambda t: t.replace('"version":2', '"version":true'), "line 1: no trace of format .* version 2$"),
        (lambda t: t.replace('"kind":"sync"', '"kind":"song"'), "line 2: 'song' is no kind of line"),
        (lambda t: t.replace('"program":"F0.0', '"program":"Q0.0'), "line 3: 'Q0.0' is not an instruction"),
        (lambda t: t.replace('"step":1,"plan":0', '"step":1,"plan":7'), "line 4: step 1 is of a plan that does not"),
        (lambda t: t.replace('"starts":[0,', '"starts":[', 1), "line 4: step 1 has .* starts and .* ends of"),
        (lambda t: t.replace('"starts":[0,', '"starts":["x",', 1), "line 4: not a line of a trace"),
        (lambda t: t.replace('"base":', '"bass":', 1), "line 4: not a line of a trace .*base"),
        (lambda t: t.replace('"pipeline_size":2', '"pipeline_size":0'), "line 3: pipeline size is 0"),
        (lambda t: t.replace('"rank":0,', '"rank":5,', 1), "line 1: rank 5 is not in a pipeline of 2"),
        (lambda t: "[]\n" + t, "line 1: not a line of a trace"),
    ],
)
def test_bad_files_are_refused_with_their_line(recorded, damage, message):
    path = rank_file(recorded, 0)
    path.write_text(damage(path.read_text()))
    with pytest.raises(FileFormatError, match=f"{path.name}.*{message}"):
        load_run(recorded)


def test_ranks_that_ran_different_plans_are_found(recorded):
    path = rank_file(recorded, 1)
    path.write_text(path.read_text().replace('"num_microbatches":4', '"num_microbatches":8'))
    with pytest.raises(FileFormatError, match="rank 1 ran another plan than rank 0"):
        load_run(recorded).plan(1)


def test_a_step_that_was_not_recorded_is_refused(recorded):
    with pytest.raises(FileFormatError, match="step 7 was not recorded by all ranks; recorded steps: 1, 2, 3"):
        analyse(load_run(recorded), 7)
