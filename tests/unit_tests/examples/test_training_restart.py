"""Where a run begins: anew, where --resume says, or where this launch has left it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from examples.gpt import program
from examples.gpt.checkpoint import LATEST, Checkpoint, write_description
from examples.gpt.errors import ArgumentError
from examples.gpt.process import agreed_place, check_same_settings
from examples.gpt.program import Start, find_start
from examples.gpt.settings import Settings, parse, save_settings
from tests.harness.processes import run_processes

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = {"num_layers": 4}


def make_run(folder: Path) -> Settings:
    folder.mkdir(parents=True)
    save_settings(Settings(), folder)
    return Settings(run_dir=str(folder))


def make_checkpoint(folder: Path, name: str, step: int) -> None:
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    write_description(Checkpoint(path, name, step, LAYOUT, {}, {}, {}))
    (folder / "checkpoints" / LATEST).write_text(name + "\n")


def test_a_run_that_is_started_again_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert find_start(run, LAYOUT) == Start(tmp_path / "run")
    make_checkpoint(tmp_path / "run", "step-00000004", 4)
    make_checkpoint(tmp_path / "run", "step-00000008", 8)
    for again in (run, Settings(resume=str(tmp_path / "run"))):
        start = find_start(again, LAYOUT)
        assert start.checkpoint is not None
        assert start.checkpoint.step == 8
    older = find_start(Settings(resume=str(tmp_path / "run" / "checkpoints" / "step-00000004")), LAYOUT)
    assert older.checkpoint is not None
    assert (older.folder, older.checkpoint.step) == (tmp_path / "run", 4)


def test_a_run_without_a_folder_of_its_own_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RUNS", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    first = find_start(Settings(), LAYOUT)
    assert first.folder.parent == tmp_path
    make_run(first.folder)
    monkeypatch.setattr(program.time, "strftime", lambda _: "later")
    assert find_start(Settings(), LAYOUT) == first
    monkeypatch.setattr(os, "getppid", lambda: os.getpid())  # another torchrun
    assert find_start(Settings(), LAYOUT).folder.name.startswith("later-")


@pytest.mark.parametrize("flags", [[], ["--config", "small.toml"]])
def test_a_run_lies_in_the_project_wherever_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    (tmp_path / "small.toml").write_text("num_layers = 4")
    monkeypatch.chdir(tmp_path)
    assert find_start(parse(flags), LAYOUT).folder.parent == ROOT / "runs"


def test_each_start_meets_in_a_place_of_its_own() -> None:
    """Three starts over one store; before the third, a process has drawn a number and died."""
    store = dist.HashStore()
    places: list[list[str]] = []
    for start in range(3):
        if start == 2:
            store.add("megatron_pp/meeting/numbers", 1)
        found: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda r=rank, f=found: f.update({r: agreed_place(store, r, 3)}), daemon=True)
            for rank in (2, 1, 0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        places.append([found[rank] for rank in range(3)])
    assert all(len(set(place)) == 1 for place in places)
    assert len({place[0] for place in places}) == 3


def with_flags(rank: int, size: int) -> str:
    check_same_settings({"seed": 1, "hidden_size": 32})
    try:
        check_same_settings({"seed": 1, "train_steps": 8 + rank // 2})
    except ArgumentError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_flags_that_differ_are_reported_on_every_rank() -> None:
    told = run_processes(with_flags, 3, timeout=60, start_method="forkserver")
    assert told == ["--train-steps is 8 on rank 0 and 9 on rank 2; start all nodes with the same flags"] * 3
