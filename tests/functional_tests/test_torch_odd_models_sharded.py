"""Odd models in torch's stages that ``fully_shard`` (FSDP2) shards over two replicas: losses, all gradients, buffers
and counts of calls are those of one process, as ``test_torch_odd_models.py`` without FSDP2.

Both replicas have the same batches, so that the mean of their gradients is each one's, to the bit.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from testkit.processes import run_processes
from testkit.sweeps import EXHAUSTIVE, drawn
from tests.functional_tests import torch_odd_models as models

pytestmark = pytest.mark.slow

REPLICAS = 2
# What FSDP2 itself does not do: main_grad, hooks of a parameter, sparse gradients, several dtypes in one group, layers
# without shapes, parameters that a forward writes to, and that are frozen or trained later.
WITHOUT = {"MainGrad", "Hooks", "Sparse", "Half", "Lazy", "Remembers", "gradual unfreezing", "frozen later"}
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v")
NAMES = [name for name in models.CASES if name not in WITHOUT]
PARTS = 1 if EXHAUSTIVE else 3  # each schedule runs one model of so many
(FIRST,) = drawn(range(PARTS), 1)
DRAWN = [
    (schedule, name) for k, schedule in enumerate(SCHEDULES) for i, name in enumerate(NAMES) if (k + i) % PARTS == FIRST
]
assert {name for _, name in DRAWN} == set(NAMES), "every model runs"


def _rank_main(rank: int, size: int, drawn: list[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    warnings.simplefilter("ignore")
    logging.getLogger("megatron_pp").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    pipelines = [dist.new_group(list(range(first, first + models.RANKS))) for first in range(0, size, models.RANKS)]
    across = [dist.new_group(list(range(k, size, models.RANKS))) for k in range(models.RANKS)]
    place = rank % models.RANKS
    mesh = DeviceMesh.from_group(across[place], "cpu")

    def shard(stage: nn.Module) -> None:
        if isinstance(getattr(stage, "other", None), nn.Linear):
            fully_shard(stage.other, mesh=mesh)  # one within the other
        fully_shard(stage, mesh=mesh)

    group = pipelines[rank // models.RANKS]
    return {
        (schedule, name): models.differences(place, schedule, models.CASES[name], group, shard)
        for schedule, name in drawn
    }


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, str], list[str]]]:
    return run_processes(_rank_main, REPLICAS * models.RANKS, (DRAWN,), timeout=400, start_method="mixed")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_of_odd_models_are_those_of_one_process(results: list[Any], schedule: str) -> None:
    for of_rank in results:
        assert {key: texts for key, texts in of_rank.items() if key[0] == schedule and texts} == {}
