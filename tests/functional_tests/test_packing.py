"""Random packings on two pipelines of four processes over gloo do not hang, and have the numbers of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.runtime.communicators import close_communicators, communicator_for
from testkit import sweeps
from testkit.processes import run_processes
from testkit.thread_runs.packings import SIZE, Meetings, PackedRank, config_of, drawn, one_process

RANKS = 2 * SIZE
SEEDS = sweeps.drawn(range(1000), 8)


class GroupMeetings(Meetings):
    """Context-parallel ranks that are processes, and add up in a collective."""

    def __init__(self, across: dist.ProcessGroup) -> None:
        super().__init__()
        self.across = across

    def total(self, key: Any, ranks: range, rank: int, mine: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(mine, group=self.across)
        return mine


def differences(rank: int, size: int, seeds: list[int]) -> dict[int, float]:
    """Return by seed the difference of this rank's gradients, summed over the pipelines of its step, from those of one
    process, in units of the largest gradient. A step for one pipeline runs on both."""
    pipeline, stage = divmod(rank, SIZE)
    lines = [dist.new_group([SIZE * k + r for r in range(SIZE)]) for k in range(2)]
    across = [dist.new_group([r, SIZE + r]) for r in range(SIZE)][stage]
    found = {}
    for seed in seeds:
        one = drawn(seed)
        config = config_of(one.num_chunks, **one.fields)
        communicator = communicator_for(lines[pipeline], config)
        number = pipeline if one.pipelines > 1 else 0
        runner = PackedRank(number, stage, config, communicator, one.num_chunks, GroupMeetings(across))
        grads = runner.step(runner.model(), one.step).grads
        if one.pipelines > 1:
            for grad in grads.values():
                dist.all_reduce(grad, group=across)
        packs = [pack for slot in one.step.slots for pack in slot.packs]
        found[seed] = distance(grads, one_process(packs, SIZE * one.num_chunks).grads)
    close_communicators()
    return found


def distance(grads: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    return max(float((grad - wanted[name]).abs().max()) for name, grad in grads.items()) / largest


@pytest.mark.slow
def test_random_packings_on_processes_neither_hang_nor_change_a_number() -> None:
    """A run draws eight of a thousand packings, or takes all with MEGATRON_PP_EXHAUSTIVE=1."""
    ranks = run_processes(differences, RANKS, (SEEDS,), timeout=60 + 6 * len(SEEDS), start_method="mixed")
    for seed in SEEDS:
        limit = 1e-12 if drawn(seed).pipelines > 1 else 0.0
        assert max(found[seed] for found in ranks) <= limit, drawn(seed)
