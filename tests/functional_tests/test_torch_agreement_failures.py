"""If a rank dies, raises or hangs while the ranks of torch's stages agree on a step, every other rank gets an error
with its name, in bounded time.

The ranks agree in two places: on the batches, when each step begins; and on the tensors between stages, in the first
step, for which each stage runs once on zeros.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.integrations.torch_pipelining import PlanSchedule
from megatron_pp.runtime.communicators import close_communicators
from testkit.faults.ends import fail
from testkit.processes import RankFailedError, run_processes
from testkit.sweeps import drawn

pytestmark = pytest.mark.slow

SIZE, MICROBATCHES, WIDTH, STEPS = 3, 3, 4, 3
PATIENCE = 3.0  # config.p2p_timeout, seconds
SECONDS = PATIENCE + 12.0  # for as long a rank looks for the cause
BATCH, SHAPES = "its batch, in the second step", "its first forward"
PLACES = (BATCH, SHAPES)
FAULTS = ("raise", "exit", "os_exit", "kill", "stop")


def fail_once(how: str) -> None:
    """Fail this rank once, by ``how``. A stopped rank is killed later, when the others have their errors."""
    if how == "stop":
        subprocess.Popen(["/bin/sh", "-c", f"sleep {SECONDS + 5}; kill -KILL {os.getpid()}"])
    fail(how)


class Microbatches(list[Any]):
    """A list that fails its rank by ``how`` when its length is read."""

    how = ""

    def __len__(self) -> int:
        if self.how:
            fail_once(self.how)
        return super().__len__()


class Stage(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = torch.nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how:
            fail_once(self.how)
        y: torch.Tensor = self.linear(x)
        return y


def steps_of_a_rank(rank: int, size: int, place: str, how: str, victim: int) -> tuple[int, str, float]:
    """Return the number of the step that raised, the error, and its seconds."""
    here = rank == victim
    module = Stage(how if here and place == SHAPES else "")
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    config = ModelParallelConfig(overlap_p2p_comm=True, p2p_timeout=PATIENCE)
    schedule = PlanSchedule(stage, MICROBATCHES, torch.nn.functional.mse_loss, config=config)
    for step in range(STEPS):
        given = Microbatches((torch.ones(2, WIDTH),) if rank == 0 else () for _ in range(MICROBATCHES))
        given.how = how if here and place == BATCH and step == 1 else ""
        targets = [torch.ones(2, WIDTH)] * MICROBATCHES if rank == size - 1 else None
        began = time.monotonic()
        try:
            schedule.step(arg_mbs=given, target_mbs=targets)
        except BaseException as error:
            seconds = time.monotonic() - began
            close_communicators()
            dist.destroy_process_group()
            return step, f"{type(error).__name__}: {error}", seconds
    return STEPS, "no error", 0.0


CASES = [(place, how, (i + j) % SIZE) for i, place in enumerate(PLACES) for j, how in enumerate(FAULTS)]


@pytest.mark.parametrize(("place", "how", "victim"), drawn(CASES, 4))
def test_every_other_rank_of_torchs_stages_names_the_failed_rank(place: str, how: str, victim: int) -> None:
    try:
        ranks = run_processes(
            steps_of_a_rank, SIZE, (place, how, victim), timeout=60.0, start_method="forkserver", patience=40.0
        )
        found = dict(enumerate(ranks))
    except RankFailedError as error:  # one has died
        found = error.results
    own = {"raise": "ValueError: injected fault", "exit": "SystemExit: 3"}.get(how)
    assert (found[victim][1] if victim in found else None) == own
    for rank in set(range(SIZE)) - {victim}:
        step, error, seconds = found[rank]
        assert step == (1 if place == BATCH else 0), error
        assert f"rank {victim}" in error, f"rank {rank}: {error}"
        assert seconds < SECONDS, error
