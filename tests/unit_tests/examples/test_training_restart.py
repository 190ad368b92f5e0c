"""Where a run begins: anew, where --resume says, or where this launch has left it; and with which settings."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from examples.gpt import program
from examples.gpt.checkpoint import Checkpoint, make_newest, write_description
from examples.gpt.process import agreed_place
from examples.gpt.program import Start, _layout, find_start
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


def test_a_run_without_a_folder_of_its_own_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RUNS", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    first = find_start(Settings(), LAYOUT)
    assert first.folder.parent == tmp_path
    save_run(first.folder, Settings())
    monkeypatch.setattr(program.time, "strftime", lambda _: "later")
    assert find_start(Settings(), LAYOUT) == first
    monkeypatch.setattr(os, "getppid", lambda: os.getpid())  # another torchrun
    assert find_start(Settings(), LAYOUT).folder.name.startswith("later-")


@pytest.mark.parametrize("flags", [[], ["--config", "small.toml"]])
def test_run_folders_are_in_the_project_whatever_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    (tmp_path / "small.toml").write_text("num_layers = 4")
    monkeypatch.chdir(tmp_path)
    assert find_start(parse(flags), LAYOUT).folder.parent == ROOT / "runs"


@pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/step-00000003"])
def test_a_resumed_run_remembers_its_flags(tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run also finds the files that its flags name, whatever the current folder."""
    monkeypatch.chdir(tmp_path)
    flags = ["--num-layers", "8", "--overlap-p2p-comm", "--learning-rate", "1e-3", "--run-dir", "x"]
    started = parse([*flags, "--data", "a", "/b"])
    save_run(tmp_path, started, 3)
    resumed = parse(["--resume", str(tmp_path / inside), "--train-steps", "17"])
    changes: dict[str, Any] = {"run_dir": None, "resume": str(tmp_path / inside), "train_steps": 17}
    assert resumed == dataclasses.replace(started, data=(str(tmp_path / "a"), "/b"), **changes)
    save_settings(parse(["--pipeline-schedule", "a.csv", "--pipeline-measured", "b.json"]), tmp_path)
    saved = saved_values(tmp_path)
    assert [saved[f"pipeline_{name}"] for name in ("schedule", "measured")] == [
        *(str(tmp_path / name) for name in ("a.csv", "b.json"))
    ]


def test_a_schedule_that_is_given_anew_brings_its_own_chunks(tmp_path: Path) -> None:
    save_run(tmp_path, parse(["--virtual-pipeline-model-parallel-size", "2", "--overlap-p2p-comm"]))
    resumed = parse(["--resume", str(tmp_path), "--pipeline-schedule", "zb_h1"])
    assert (resumed.model.virtual_pipeline_model_parallel_size, resumed.model.overlap_p2p_comm) == (None, True)


def test_each_start_uses_its_own_rendezvous_key() -> None:
    """Three starts over one store; before the third, a process has drawn a number and died."""
    store = dist.HashStore()
    places: list[set[str]] = []
    for start in range(3):
        if start == 2:
            store.add("megatron_pp/meeting/numbers", 1)
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda r=rank, f=found: f.append(agreed_place(store, r, 3)), daemon=True)
            for rank in (2, 1, 0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(found) == 3
        places.append(set(found))
    assert [len(place) for place in places] == [1, 1, 1]
    assert len(set.union(*places)) == 3
