"""Write PyTorch's own pipeline schedules as CSV. Each has a file with the compute order, ``NAME.csv``, and one with the
communication of its runtime, ``NAME-comms.csv``.

Run it in a process of its own: PyTorch's stages need a process group, here its fake one, which never communicates.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def stage(index: int, count: int) -> PipelineStage:
    return PipelineStage(torch.nn.Linear(2, 2), index, count, torch.device("cpu"))


def make(name: str, size: int, microbatches: int) -> schedules._PipelineSchedule:
    kind = getattr(schedules, name)
    loss = torch.nn.functional.mse_loss
    if name in SINGLE:
        return kind(stage(0, size), microbatches, loss_fn=loss)
    count = 2 * size
    mine = (0, count - 1) if name in V_SHAPED else (0, size)
    return kind([stage(i, count) for i in mine], microbatches, loss_fn=loss)


def write_files(rank: int, world: int, folders: dict[tuple[int, int], Path]) -> None:
    """Write the files of each (pipeline size, microbatches) into its folder."""
    for (size, microbatches), folder in folders.items():
        _write(folder, size, microbatches)


def _write(folder: Path, size: int, microbatches: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    for name in SINGLE + LOOPED + V_SHAPED:
        made = make(name, size, microbatches)
        target = folder / f"{name}.csv"
        if isinstance(made, schedules._PipelineScheduleRuntime):
            made._dump_csv(str(target), format="compute_only")
            made._dump_csv(str(target.with_name(f"{name}-comms.csv")), format="compute_comms")
        else:
            with target.open("w", newline="") as out:
                csv.writer(out).writerows(made.pipeline_order.values())
    dist.destroy_process_group()
