"""Checkpoints: exact, whole or not there, and nothing in them is run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.gpt.checkpoint import (
    DESCRIPTION,
    LATEST,
    Checkpoint,
    CheckpointWriter,
    check_layout,
    find_checkpoint,
    load_tensors,
)
from examples.gpt.errors import CheckpointError, CheckpointLayoutError, CheckpointWriteError
from tests.harness.processes import run_processes

LAYOUT = {"stages": 2, "layers_of_stages": [[0], [1, 2]]}


@pytest.fixture(scope="module", autouse=True)
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(5, 3, generator=draw),
        "model.half": torch.randn(7, generator=draw).bfloat16(),
        "optimizer.step": torch.tensor(float(seed)),
        "rng": torch.randint(256, (9,), generator=draw, dtype=torch.uint8),
        "empty": torch.zeros(0),
    }


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return CheckpointWriter(folder, keep, LAYOUT).save(step, make_tensors(step), {"note": step})


def loaded(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(0).items()}
    load_tensors(checkpoint, tensors)
    return tensors


def assert_holds(checkpoint: Checkpoint, step: int) -> None:
    assert (checkpoint.step, checkpoint.progress) == (step, {"note": step})
    expected = make_tensors(step)
    for name, tensor in loaded(checkpoint).items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("given", ["checkpoints", ".", "checkpoints/step-00000004"])
def test_what_is_saved_is_loaded(tmp_path: Path, given: str) -> None:
    path = save(tmp_path / "checkpoints", 4)
    found = find_checkpoint(tmp_path / given)
    assert found.path.resolve() == path.resolve()
    check_layout(found, LAYOUT)
    assert_holds(found, 4)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST, "step-00000004", "step-00000005"]
    assert_holds(find_checkpoint(tmp_path), 5)
    assert_holds(find_checkpoint(tmp_path / "step-00000004"), 4)


def test_a_step_saved_again_leaves_the_first_whole(tmp_path: Path) -> None:
    first, second = save(tmp_path, 3), save(tmp_path, 3)
    assert first != second
    assert find_checkpoint(tmp_path).path == second
    assert_holds(find_checkpoint(first), 3)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match=f"{tmp_path}/checkpoints cannot be written"):
        save(tmp_path / "checkpoints", 1)


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(CheckpointWriteError, match=r"cannot be written: .*No space left"):
            save(tmp_path, 2)
    assert_holds(find_checkpoint(tmp_path), 1)


def test_another_layout_is_refused_by_what_differs(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointLayoutError, match=r"stages is 2 there and 3 here; width is None there and 8 here"):
        check_layout(find_checkpoint(tmp_path), {**LAYOUT, "stages": 3, "width": 8})


def test_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / LATEST).write_text("step-00000009\n")
    with pytest.raises(CheckpointError, match=r"step-00000009.* cannot be used"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2, "step": 1}', "\xff"])
def test_damaged_descriptions_are_refused(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1)
    (path / DESCRIPTION).write_text(text)
    with pytest.raises(CheckpointError, match=r"description.json cannot be used: .*; give --resume an older"):
        find_checkpoint(tmp_path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: there is no model.unknown"):
        load_tensors(find_checkpoint(tmp_path), {"model.unknown": torch.zeros(1)})


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (data,) = path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*__0_0.distcp is damaged"):
        loaded(find_checkpoint(tmp_path))


def on_two_ranks(rank: int, size: int, folder: str) -> list[str]:
    """What each save and load ends with; ``shared`` is on both ranks, each loads what the other has saved, and rank 1's
    disk is full once."""
    writer = CheckpointWriter(Path(folder), 2, LAYOUT)
    tensors = {"shared": torch.arange(6.0), f"own{rank}": torch.full((4,), float(rank))}
    path = writer.save(1, tensors, {})
    told = [",".join(sorted(find_checkpoint(path).tensors))]
    kept = {"shared": torch.zeros(6), f"own{1 - rank}": torch.zeros(4)}
    load_tensors(find_checkpoint(path), kept)
    expected = {"shared": torch.arange(6.0), f"own{1 - rank}": torch.full((4,), 1.0 - rank)}
    told.append(str(all(kept[name].equal(tensor) for name, tensor in expected.items())))
    fsync = os.fsync
    if rank == 1:
        os.fsync = full_disk
    try:
        writer.save(2, tensors, {})
    except CheckpointWriteError as error:
        told.append(str(error))
    os.fsync = fsync
    dist.barrier()
    told.append(",".join(sorted(entry.name for entry in Path(folder).iterdir())))
    dist.barrier()
    if rank == 1:
        (path / "__1_0.distcp").write_bytes(bytes(16))
    dist.barrier()
    try:
        load_tensors(find_checkpoint(path), kept)
    except CheckpointError as error:
        told.append(str(error))
    return told


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_a_failure_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_processes(on_two_ranks, 2, (str(tmp_path),), timeout=120, start_method="forkserver")
    assert first == second
    placed, equal, unwritten, left, damaged = first
    assert (placed, equal, left) == ("own0,own1,shared", "True", "latest,step-00000001")
    assert unwritten == f"a checkpoint in {tmp_path} cannot be written: [Errno 28] No space left on device"
    assert "__1_0.distcp is damaged: it does not have the CRC-32" in damaged
    assert "give --resume an older checkpoint" in damaged
