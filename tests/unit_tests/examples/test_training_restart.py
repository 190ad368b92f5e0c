"""Where a run begins: anew, where --resume says, or where this launch has left it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from examples.gpt import run_folder
from examples.gpt.checkpoint import LATEST, Checkpoint, write_description
from examples.gpt.distributed import agreed_place, check_same_settings
from examples.gpt.errors import ArgumentError
from examples.gpt.run_folder import Start, find_start, this_launcher
from examples.gpt.settings import ARGUMENTS, Settings, parse, save_settings
from tests.harness.processes import run_processes

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = {"num_layers": 4}
OURS, OTHER = "here/7/100", "there/9/100"


def make_run(folder: Path, launcher: str = OURS) -> Settings:
    folder.mkdir(parents=True)
    save_settings(Settings(), folder, launcher)
    return Settings(run_dir=str(folder))


def make_checkpoint(folder: Path, name: str, step: int, launcher: str = OURS) -> Path:
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    write_description(Checkpoint(path, name, step, LAYOUT, {"launcher": launcher}, {}, {}))
    (folder / "checkpoints" / LATEST).write_text(name + "\n")
    return path


@pytest.mark.parametrize("launcher", ["", OTHER])
def test_a_folder_that_holds_a_run_is_not_taken_for_a_new_one(tmp_path: Path, launcher: str) -> None:
    for wrote in ("", OURS):
        run = make_run(tmp_path / f"run{len(wrote)}", wrote)
        with pytest.raises(ArgumentError, match=r"holds a run already; give another, or --resume"):
            find_start(run, LAYOUT, launcher)


def test_the_launch_that_began_a_run_goes_on_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert find_start(run, LAYOUT, OURS) == Start(tmp_path / "run")
    make_checkpoint(tmp_path / "run", "step-00000004", 4)
    start = find_start(run, LAYOUT, OURS)
    assert start.checkpoint is not None
    assert start.checkpoint.step == 4


def test_a_run_resumed_from_an_older_checkpoint_does_so_again_until_it_has_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, OTHER)
    old = make_checkpoint(folder, "step-00000004", 4, OTHER)
    make_checkpoint(folder, "step-00000008", 8, OTHER)
    run = Settings(resume=str(old))
    for _ in range(3):  # the first start, and two restarts before anything was saved
        start = find_start(run, LAYOUT, OURS)
        assert start.checkpoint is not None
        assert start.checkpoint.step == 4
        save_settings(run, folder, OURS)
    make_checkpoint(folder, "step-00000008-2", 8)
    start = find_start(run, LAYOUT, OURS)
    assert start.checkpoint is not None
    assert start.checkpoint.path.name == "step-00000008-2"


def test_a_run_without_a_folder_of_its_own_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "RUNS", tmp_path)
    first = find_start(Settings(), LAYOUT, OURS)
    make_run(first.folder)
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "later")
    assert find_start(Settings(), LAYOUT, OURS) == Start(first.folder)
    other = find_start(Settings(), LAYOUT, OTHER).folder
    assert other.parent == tmp_path
    assert other.name.startswith("later-")


@pytest.mark.parametrize("flags", [[], ["--config", "small.toml"]])
def test_a_run_lies_in_the_project_wherever_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    (tmp_path / "small.toml").write_text("num_layers = 4")
    monkeypatch.chdir(tmp_path)
    assert find_start(parse(flags), LAYOUT, "").folder.parent == ROOT / "runs"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"launcher": ""}', '{"launcher": 1}', '{"launcher": {}}'])
def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "run" / ARGUMENTS).write_text(text)
    for launcher in ("", OURS):
        with pytest.raises(ArgumentError, match="holds a run already"):
            find_start(run, LAYOUT, launcher)


def test_a_launcher_is_the_process_that_torchrun_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert this_launcher() == ""
    found = set()
    for run in ("none", "other"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        found.add(this_launcher())
    assert len(found) == 1
    assert "" not in found


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
