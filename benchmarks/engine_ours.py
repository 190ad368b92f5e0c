"""Our engine, for `engines.make_step`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.work import SECONDS, MakeStage, Step, Unavailable, Work, scheduled_step, step_of
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import family_of
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.weight_grad import split_weight_grad


def make(engine: str, work: Work, rank: int, group: Any, make_stage: MakeStage, transport: Any) -> Step:
    family = family_of(work.spec())
    placement = Placement(family.placement, work.pipeline_size, work.num_chunks)
    config = make_config(work)
    chunks = [PipelineStage(make_stage(stage), config, c) for c, stage in enumerate(placement.stages[rank])]
    if family.splits_weight and split_weight_grad(chunks).report.delayed < len(chunks):
        raise Unavailable(f"{work.schedule} splits the backward, which these stages cannot")
    alone = work.pipeline_size == 1
    communicator = None if alone else P2PCommunicator(group, config, *([transport] if transport is not None else []))
    function = get_forward_backward_func(work.pipeline_size, work.virtual_size)
    return scheduled_step(work, function, chunks, p2p_communicator=communicator)


def step_config(pipeline_size: int, num_layers: int, hidden_size: int, heads: int, **fields: Any) -> TransformerConfig:
    """The config of a step with overlap, for the benchmarks that have their own models."""
    return TransformerConfig(
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        p2p_timeout=SECONDS,
        compute_timeout=SECONDS,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        **fields,
    )


def step_of_model(
    chunk: Any, forward_step: Callable[..., Any], data: Callable[[], Any], num_microbatches: int, seq_length: int
) -> Step:
    """A step of this rank's only chunk. Each microbatch is one sequence."""
    size = dist.get_world_size()
    communicator = P2PCommunicator(dist.group.WORLD, chunk.config)
    arguments = forward_step, [chunk], data, num_microbatches, seq_length
    return step_of(get_forward_backward_func(size), *arguments, p2p_communicator=communicator)


def make_config(work: Work) -> SimpleNamespace:
    return SimpleNamespace(
        pipeline_dtype=torch.float32,
        hidden_size=work.shape[2],
        virtual_pipeline_model_parallel_size=work.virtual_size,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=work.overlaps,
        batch_p2p_comm=work.policy == "batched",
        pipeline_schedule=work.schedule,
        p2p_timeout=SECONDS,
        compute_timeout=SECONDS,
    )
