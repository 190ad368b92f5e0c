"""Runs sequences in slices whose blocks are recomputed. In its backward a block asks again which slice it computes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from gpu_day import ranks
from gpu_day.bench import Bench
from megatron_pp.comm.backends import group_transport
from megatron_pp.features.slices.sequence_slice import sequence_slice
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import ToyBlock, gradients_of, toy_forward_step

SLICES, MICROBATCHES = 4, 4
SCHEDULES = {"seq_1f1b": 1, "interleaved_seq_1f1b": 2}  # schedule -> chunks of a rank


class CausalBlock(ToyBlock):
    """A stage of the toy model on the mean of all tokens so far. Slices pass their tokens on, as with keys and
    values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = sequence_slice()
        seen = x
        if part is not None:
            (seen,) = part.extend(self, x, dim=0)
        count = torch.arange(1, len(seen) + 1, device=x.device).view(-1, 1, 1)
        means = seen.cumsum(0) / count
        return super().forward(means if part is None else means[part.start :])


class RecomputedBlock(CausalBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Recomputed tensors are compared by their gradients.
        return checkpoint(super().forward, x, use_reentrant=False, determinism_check="none")  # type: ignore[no-any-return]


class Whole(torch.nn.Module):
    """All stages, one after the other."""

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        self.stages = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def run(bench: Bench) -> None:
    found = bench.ranks(_rank)
    for name in SCHEDULES:
        worst = max(one[name] for one in found)
        what = f"{name}, {SLICES} slices, blocks recomputed: gradients are those of one process with the blocks kept"
        bench.check(worst == 0.0, f"{what} (difference {worst:g})")


def _rank(rank: int, size: int, device: torch.device) -> dict[str, float]:
    found = {}
    transport = group_transport(dist.group.WORLD)
    for name, chunks in SCHEDULES.items():
        step = ranks.Step(name, chunks, MICROBATCHES, {**ranks.OVERLAP, "sequence_slices": SLICES})
        config = step.config()
        data = step.data(device)
        communicator = P2PCommunicator(dist.group.WORLD, config, transport)

        recomputed = partial(_block, RecomputedBlock, step.hidden, device)
        mine = run_rank(rank, size, chunks, data, config, communicator, block=recomputed)
        kept = [_block(CausalBlock, step.hidden, device, stage) for stage in range(size * chunks)]
        whole = _alone(step, data, kept)
        found[name] = ranks.largest_difference(mine.grads, whole)
    transport.close()
    return found


def _block(kind: type[ToyBlock], hidden: int, device: torch.device, stage: int) -> torch.nn.Module:
    return kind(stage, hidden).to(device)


def _alone(step: ranks.Step, data: Any, blocks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The gradients of a step without a pipeline, in the same slices."""
    config = step.config(virtual_pipeline_model_parallel_size=None)
    get_forward_backward_func(1, None)(
        forward_step_func=toy_forward_step,
        data_iterator=data.iterator(),
        model=PipelineStage(Whole(blocks), config, stage=0),
        num_microbatches=data.num_microbatches,
        seq_length=data.seq_length,
        micro_batch_size=data.micro_batch_size,
        pg_collection=SimpleNamespace(pp=None),
    )
    return gradients_of(dict(enumerate(blocks)))
