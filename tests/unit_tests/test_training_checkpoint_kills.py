"""A kill at any moment of saving leaves a whole checkpoint: the former one, or the new one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.training.checkpoint import CheckpointWriter, find_checkpoint, load_tensors

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
LAYOUT = {"pipeline_model_parallel_size": 1}


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((64,), float(step)), "optimizer.weight": torch.full((8,), -float(step))}


def save(folder: Path, steps: range, kill_at: int = 0) -> int:
    """In a process of its own: save ``steps``, and be killed before the ``kill_at``th file operation of the last one.

    Returns how it ended, as ``os.waitstatus_to_exitcode``: 0, or minus the signal.
    """
    pid = os.fork()
    if pid == 0:
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            writer = CheckpointWriter(folder, 1, LAYOUT)
            for step in steps:
                if step == steps[-1]:
                    kill_before(kill_at, folder)
                writer.save(step, tensors(step), {"step": step})
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_before(number: int, folder: Path) -> None:
    """Have this process killed before its ``number``th file operation in ``folder``."""
    left = [number]

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and str(args[0]).startswith(str(folder)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*multi-threaded.*fork")
def test_a_kill_at_any_moment_of_saving_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    """Step 1 is saved, step 2 cut short before each of its file operations in turn, and step 3 saved after that."""
    found = []
    for kill_at in range(1, 100):
        folder = tmp_path / str(kill_at)
        ended = save(folder, range(1, 3), kill_at)
        checkpoint = find_checkpoint(folder)
        kept = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
        load_tensors(checkpoint, kept)
        assert {name: tensor.tolist() for name, tensor in kept.items()} == {
            name: tensor.tolist() for name, tensor in tensors(checkpoint.step).items()
        }
        assert checkpoint.progress == {"step": checkpoint.step}
        found.append(checkpoint.step)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        assert save(folder, range(3, 4)) == 0
        assert find_checkpoint(folder).step == 3
        assert len([path for path in folder.iterdir() if path.name.startswith(".")]) == 0
    assert found == sorted(found)
    assert len(found) > 12
    assert set(found) == {1, 2}
