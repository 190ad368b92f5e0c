"""Clipping, optimizer, learning rate, interrupts, timers and metrics: each by itself, in one process."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from examples.gpt import program
from examples.gpt.gpt import OUTPUT
from examples.gpt.metrics import METRICS, PLOT, TENSORBOARD, Recorder, plot_loss, read_metrics
from examples.gpt.optimizer import GradientClipper, NamedAdamW, learning_rate
from examples.gpt.process import StopRequest, report
from examples.gpt.run_page import steps_to_record, write_page
from examples.gpt.settings import Settings
from examples.gpt.trainer import ComputeTimers
from testkit.training_ranks import handlers_kept
from tests.unit_tests.examples.test_gpt import WHOLE, gradients_of, make_stages, train_by_hand


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("share", [0.25, 0.0, 1e9])
def test_gradients_are_scaled_to_a_share_of_their_norm(group: dist.ProcessGroup, tied: bool, share: float) -> None:
    """In which a tied embedding counts once. Small ones, and those without a limit, are left alone."""
    train_by_hand(stages := make_stages(WHOLE, share_embeddings_and_output_weights=tied))
    gradients = {name: gradient.clone() for name, gradient in gradients_of(stages).items()}
    counted = [gradient for name, gradient in gradients.items() if not (tied and name == OUTPUT)]
    expected = math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in counted))
    clipper = GradientClipper(stages, group, max_norm=expected * share)
    assert clipper.num_parameters == sum(gradient.numel() for gradient in counted)
    assert float(clipper.clip()) == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients_of(stages).items():
        if share == 0.25:
            torch.testing.assert_close(gradient, gradients[name] / 4)
        else:
            assert torch.equal(gradient, gradients[name])


def test_the_learning_rate_rises_and_falls() -> None:
    settings = Settings(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4, train_steps=14)
    values = [learning_rate(step, settings) for step in range(14)]
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.1)
    assert values[4:] == sorted(values[4:], reverse=True)
    assert learning_rate(0, Settings(learning_rate=1.0, warmup_steps=0, train_steps=1)) == 1.0


def test_adamw_equals_torchs_and_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the bit, over steps of several learning rates. Importing the compiler would take a second per rank."""
    settings = Settings(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6, weight_decay=0.3)
    torch.manual_seed(0)
    ours = torch.nn.Linear(4, 3)
    theirs = copy.deepcopy(ours)
    groups = [{"params": [theirs.weight], "weight_decay": 0.3}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6)
    optimizer = NamedAdamW([ours], settings)
    for lr in (0.1, 0.01, 0.2):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = other.grad = torch.randn_like(mine)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        with monkeypatch.context() as context:
            context.setitem(sys.modules, "torch._dynamo", None)
            optimizer.step(lr)
        assert all(parameter.grad is None for parameter in ours.parameters())
    tensors = optimizer.tensors()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], parameter.detach())
        for key, value in reference.state[parameter].items():
            assert torch.equal(tensors[f"optimizer.{key}.{name}"], value)


def test_a_rank_without_parameters_takes_its_steps() -> None:
    optimizer = NamedAdamW([torch.nn.ModuleDict()], Settings())
    optimizer.step(1e-3)
    assert optimizer.tensors() == {}


def test_the_first_of_several_signals_is_the_reason_of_a_stop() -> None:
    with handlers_kept():
        stop = StopRequest()
        assert stop.first is None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.first is signal.SIGINT


def test_a_rank_that_fails_reports_before_a_signal_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher sends SIGTERM when another rank has failed, at any point of this one's end."""

    def failing(argv: list[str]) -> None:
        StopRequest()
        raise OSError(5, "the disk has gone away")

    def signalled(*_: Any, **__: Any) -> list[str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return ["the stack\n"]

    errors = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(errors))
    monkeypatch.setattr(program, "train", failing)
    monkeypatch.setattr(traceback, "format_exception", signalled)
    with handlers_kept():
        assert program.main([]) == 1
    assert "the disk has gone away" in errors.read_text()
    assert capsys.readouterr().err == "the stack\n"


def test_a_rank_without_its_error_folder_prints_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    report(OSError(5, "the disk has gone away"), foreseen=False)
    assert "OSError: [Errno 5] the disk has gone away" in capsys.readouterr().err


def test_the_launchers_last_line_quotes_the_peer_error_of_the_last_start(tmp_path: Path) -> None:
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=1, error_file="none")
    with mock.patch.dict(os.environ):  # which it changes
        from scripts import launch
    lines = [launch.summary(5, failure, tmp_path)]
    for place, message in (("0/0", "ValueError: old"), ("1/0", "OSError: gone"), ("1/1", "PipelinePeerError: raised")):
        path = tmp_path / "none_1" / f"attempt_{place}" / "error.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"message": {"message": f"{message}\nmore"}}))
        lines.append(launch.summary(5, failure, tmp_path))
    path.write_text('{"message": {"mess')  # cut short by a signal
    lines.append(launch.summary(5, failure, tmp_path))
    ended = ["rank 5 (pid 7) ended with exit code 1", "rank 4: ValueError: old", "rank 4: OSError: gone"]
    assert lines == [f"launch.py: failed: {line}" for line in (*ended, "raised", ended[2])]


def test_timers_add_up_compute_and_nothing_else() -> None:
    timers = ComputeTimers(torch.device("cpu"))
    for name in ("forward-compute", "backward-compute", "forward-recv"):
        timers(name, log_level=2).start()
        time.sleep(0.01)
        timers(name).stop()
        assert (timers.take_seconds() >= 0.01) == (name != "forward-recv")
    assert timers.take_seconds() == 0.0


VALUES = {"loss": 2.0, "tokens_per_second": 1234.6, "bubble": 0.25, "peak_memory_gib": 1.5, "mfu": 0.123}
SAID = "step {}/4: loss 2.000, 1,235 tokens/s, bubble 25%, 1.50 GiB, MFU 12.3%"


def test_the_first_rank_writes_metrics_as_lines_of_json_and_to_tensorboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of later steps, and one that was being written, are dropped when the run goes on."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for folder, done in ((None, 0), (tmp_path, 0), (tmp_path, 2)):
        recorder = Recorder(folder, done, Settings(train_steps=4, log_interval=2))
        for step in range(done + 1, 5):
            recorder.record(step, **VALUES)
        recorder.record(4, validation_loss=1.5)
        recorder.close()
        with (tmp_path / METRICS).open("a") as file:
            file.write('{"step": 4, "lo' if folder else "")
    expected = [{"step": step, **VALUES} for step in (1, 2, 3, 4)]
    assert read_metrics(tmp_path / METRICS) == [*expected, {"step": 4, "validation_loss": 1.5}]
    ends = [SAID.format(4), "step 4: validation loss 1.500"]
    assert capsys.readouterr().out.splitlines() == [SAID.format(2), *ends, *ends]
    events = accumulator.EventAccumulator(str(tmp_path / TENSORBOARD)).Reload()
    assert set(events.Tags()["scalars"]) == {*VALUES, "validation_loss"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, 2.0) for step in (1, 2, 3, 4)]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last printed lines are whole, and the bar is gone when the run is over."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stdout", said := _Terminal())
    monkeypatch.setenv("COLUMNS", "100")
    recorder = Recorder(tmp_path, 1, Settings(train_steps=4, log_interval=2, tensorboard=False))
    for step in (2, 3, 4):
        time.sleep(0.15)  # tqdm draws ten times a second
        recorder.record(step, **VALUES)
    recorder.close()
    drawn = re.split("[\r\n]+", said.getvalue())
    assert any(re.search(r"2/4 \[00:00<00:\d\d, .*loss 2\.000", line) for line in drawn), drawn
    assert [line for line in drawn if line.startswith("step ")] == [SAID.format(step) for step in (2, 4)]
    assert not drawn[-1].strip()


def test_some_steps_of_every_start_are_recorded() -> None:
    starts = {(0, 400): "8-10", (0, 9): "7-9", (0, 2): "1-2", (4, 8): "6-8", (90, 400): "98-100", (8, 8): None}
    assert {start: steps_to_record(*start) for start in starts} == starts


def test_the_page_of_a_run_without_traces_has_its_charts(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(json.dumps({"step": 1, **VALUES}) + "\n")
    page = write_page(tmp_path, tmp_path / "traces", "1f1b on <cpu>").read_text()
    assert [page.count(word) for word in ("<figure>", "<canvas", "there are no traces", "&lt;cpu&gt;")] == [4, 0, 1, 2]
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|https?://", page)


def test_the_plot_has_its_title_and_both_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, path, **_: drawn.append((figure, path.name)))
    records = [{"step": step, **VALUES} for step in (1, 2, 3)] + [{"step": 3, "validation_loss": 1.5}]
    # The next line of a run's metrics is not a number, so that line and those after it are not read.
    lines = [*map(json.dumps, records), '{"step": 4, "loss": "low"}', '{"step": 5, "loss": 2.0}']
    (tmp_path / METRICS).write_text("\n".join(lines))
    assert plot_loss(tmp_path, "1f1b on cpu") is None
    ((figure, name),) = drawn
    (axes,) = figure.axes
    assert (name, axes.get_title()) == (PLOT, "1f1b on cpu")
    assert {line.get_label(): len(line.get_xdata()) for line in axes.lines} == {"training": 3, "validation": 1}
