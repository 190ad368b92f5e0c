"""What ranks of the training program do together, each failure an error on all of them; in one start of three."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gpt.checkpoint import CheckpointWriter, find_checkpoint, load_tensors
from examples.gpt.process import check_same_settings
from testkit.processes import run_processes

SIZE = 3


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rank_main(rank: int, size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"same flags": error_of(lambda: check_same_settings({"seed": 1, "hidden_size": 32}))}
    found["other flags"] = error_of(lambda: check_same_settings({"seed": 1, "train_steps": 8 + rank // 2}))
    return {**found, **save_and_load(rank, Path(folder))}


def save_and_load(rank: int, folder: Path) -> dict[str, Any]:
    """``shared`` is on all ranks, each loads what another has saved, and rank 1's disk is full once."""
    writer, other = CheckpointWriter(folder, 2, {}), (rank + 1) % SIZE
    tensors = {"shared": torch.arange(6.0), f"own{rank}": torch.full((4,), float(rank))}
    path = writer.save(1, tensors, {})
    found: dict[str, Any] = {"placed": sorted(find_checkpoint(path).tensors)}
    kept = {"shared": torch.zeros(6), f"own{other}": torch.zeros(4)}
    load_tensors(find_checkpoint(path), kept)
    found["equal"] = kept["shared"].equal(torch.arange(6.0)) and bool((kept[f"own{other}"] == other).all())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "fsync", full_disk)
        found["unwritten"] = error_of(lambda: writer.save(2, tensors, {}))
    dist.barrier()
    found["left"] = sorted(entry.name for entry in folder.iterdir())
    dist.barrier()
    if rank == 1:
        (path / "__1_0.distcp").write_bytes(bytes(16))
    dist.barrier()
    return {**found, "damaged": error_of(lambda: load_tensors(find_checkpoint(path), kept))}


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_ranks_agree_on_settings_and_checkpoints(tmp_path: Path) -> None:
    first, *others = run_processes(rank_main, SIZE, (str(tmp_path),), timeout=120, start_method="forkserver")
    assert others == [first] * 2
    damaged = first.pop("damaged")
    assert "__1_0.distcp is damaged: it does not have the CRC-32" in damaged
    assert "give --resume an older checkpoint" in damaged
    unlike = "--train-steps is 8 on rank 0 and 9 on rank 2; start all nodes with the same flags"
    no_space = f"a checkpoint in {tmp_path} cannot be written: [Errno 28] No space left on device"
    assert first == {
        "same flags": "",
        "other flags": f"ArgumentError: {unlike}",
        "placed": ["own0", "own1", "own2", "shared"],
        "equal": True,
        "unwritten": f"CheckpointWriteError: {no_space}",
        "left": ["latest", "step-00000001"],
    }
