"""The folder of a run: where a run begins, with which settings, alone in the folder, and not without its launcher."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from examples.gpt import process, program
from examples.gpt.checkpoint import Checkpoint, make_newest, write_description
from examples.gpt.errors import ArgumentError
from examples.gpt.program import LOCK, WRITTEN, Start, _layout, find_start, lock_folder
from examples.gpt.settings import Settings, parse, save_settings, saved_values

ROOT = Path(__file__).resolve().parents[3]


def layout_of(settings: Settings) -> dict[str, Any]:
    """On two ranks."""
    return _layout(settings, settings.make_config(2))


LAYOUT = layout_of(Settings())


def save_run(folder: Path, settings: Settings, *steps: int) -> None:
    """What a run has left that has saved checkpoints after these steps, tensors apart."""
    folder.mkdir(parents=True, exist_ok=True)
    save_settings(settings, folder)
    for step in steps:
        path = folder / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        write_description(Checkpoint(path, path.name, step, layout_of(settings), {}, {}, {}))
        make_newest(path)


def start_of(settings: Settings, again: bool = False) -> tuple[Path, int]:
    """The folder, and the step that was done."""
    start = find_start(settings, LAYOUT, again)
    return start.folder, 0 if start.checkpoint is None else start.checkpoint.step


def test_a_run_that_is_started_again_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run, resumed = Settings(run_dir=str(folder)), Settings(resume=str(folder))
    save_run(folder, Settings())
    assert find_start(run, LAYOUT) == Start(folder)
    save_run(folder, Settings(), 4, 8)
    named = Settings(resume=str(folder / "checkpoints" / "step-00000004"))
    assert [start_of(settings) for settings in (run, resumed, named)] == [(folder, step) for step in (8, 8, 4)]
    assert start_of(named, again=True) == (folder, 8)


def test_a_run_without_a_folder_of_its_own_is_in_the_project_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text("num_layers = 4")
    for flags in ([], ["--config", "small.toml"]):
        assert find_start(parse(flags), LAYOUT).folder.parent == ROOT / "runs"
    monkeypatch.setattr(program, "RUNS", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    first = find_start(Settings(), LAYOUT)
    save_run(first.folder, Settings())
    monkeypatch.setattr(program.time, "strftime", lambda _: "later")
    assert find_start(Settings(), LAYOUT) == first
    monkeypatch.setattr(os, "getppid", lambda: os.getpid())  # another torchrun
    assert find_start(Settings(), LAYOUT).folder.name.startswith("later-")


@pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/step-00000003"])
def test_a_resumed_run_remembers_its_flags(tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run also finds the files that its flags name, whatever the current folder. A new schedule brings its own
    chunks."""
    monkeypatch.chdir(tmp_path)
    flags = ["--virtual-pipeline-model-parallel-size", "2", "--overlap-p2p-comm", "--learning-rate", "1e-3"]
    started = parse([*flags, "--run-dir", "x", "--data", "a", "/b"])
    save_run(tmp_path, started, 3)
    resume = ["--resume", str(tmp_path / inside)]
    changes: dict[str, Any] = {"run_dir": None, "resume": resume[1], "train_steps": 17}
    expected = dataclasses.replace(started, data=(str(tmp_path / "a"), "/b"), **changes)
    assert parse([*resume, "--train-steps", "17"]) == expected
    model = parse([*resume, "--pipeline-schedule", "zb_h1"]).model
    assert (model.virtual_pipeline_model_parallel_size, model.overlap_p2p_comm) == (None, True)
    save_settings(parse(["--pipeline-schedule", "a.csv", "--pipeline-measured", "b.json"]), tmp_path)
    saved = saved_values(tmp_path)
    files = [saved["pipeline_schedule"], saved["pipeline_measured"]]
    assert files == [str(tmp_path / "a.csv"), str(tmp_path / "b.json")]


def test_each_start_meets_under_its_own_prefix_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three starts over one store; before the third, a process has drawn a number and died."""
    monkeypatch.setattr(process, "_PATIENCE", timedelta(seconds=20))
    store, places = dist.HashStore(), []
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(3) as threads:
        for start in range(3):
            if start == 2:
                store.add("megatron_pp/meeting/numbers", 1)
            found = [threads.submit(process.agreed_place, store, rank, 3) for rank in (2, 1, 0)]
            places.append({place.result() for place in found})
    assert [len(place) for place in places] == [1, 1, 1]
    assert len(set.union(*places)) == 3


def test_a_file_system_without_locks_is_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="cannot be locked .*No locks available.*: do not start a second run in it"):
        lock_folder(tmp_path).close()


PUT_THERE = {
    "link": lambda path, victim: path.symlink_to(victim),
    "link to nothing": lambda path, victim: path.symlink_to(victim.with_name("nothing")),
    "second name": lambda path, victim: path.hardlink_to(victim),
}
IN_THE_WAY = [(name, kind) for name in WRITTEN for kind in PUT_THERE]


@pytest.mark.parametrize(("name", "kind"), IN_THE_WAY, ids=[" is a ".join(case) for case in IN_THE_WAY])
def test_a_folder_whose_files_are_links_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    PUT_THERE[kind](folder / name, victim)
    with pytest.raises(ArgumentError, match=rf"it is a link, and a run writes only into its own folder.*{name}"):
        lock_folder(folder)
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["run", "victim", name])


def test_a_path_that_cannot_be_a_runs_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / LOCK)
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(ArgumentError, match="the run's folder cannot be used"):
            lock_folder(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system's own means")
def test_a_process_whose_launcher_ended_before_it_registered_ends_too() -> None:
    """test_train_script.py shows that a process whose launcher lives goes on."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "MEGATRON_PP_LAUNCHER": str(gone.pid)}
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--train-steps", "-1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (done.stdout + done.stderr).strip() == f"train.py: process {gone.pid}, its launcher, has ended"
