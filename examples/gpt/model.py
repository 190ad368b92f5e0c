"""This rank's part of the model, with its backward split where the schedule wants it split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from examples.gpt.arguments import RunArguments
from examples.gpt.data import VOCAB_SIZE
from examples.gpt.gpt import GPTStage, build_gpt_chunks
from examples.gpt.grid import GridMember
from examples.gpt.libraries import Libraries
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.schedule_file import find_family
from megatron_pp.weight_grad import split_weight_grad


@dataclass(frozen=True)
class Model:
    """Attributes:
    chunks: this rank's chunks, in the order of the schedule's placement.
    told: a line about the backward, for the start of the run.
    """

    chunks: list[GPTStage]
    told: str


def splits_backward(config: TransformerConfig) -> bool:
    """Whether the config's schedule has weight-gradient operations."""
    return find_family(config.schedule_name).splits_weight


def build_model(
    run: RunArguments, config: TransformerConfig, grid: GridMember, device: torch.device, libraries: Libraries
) -> Model:
    """Build the chunks that the placement gives this rank; convert them where the schedule splits backwards."""
    placement = Placement(config.placement_name, config.pipeline_model_parallel_size, config.num_chunks)
    replicas = grid.data_group if dist.get_world_size(grid.data_group) > 1 else None
    chunks = build_gpt_chunks(
        config,
        stages=placement.stages[grid.pipeline_rank],
        layers_of_stage=config.layers_of_stages(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=run.seq_length,
        share_embeddings_and_output_weights=not run.untie_embeddings_and_output_weights,
        seed=run.seed,
        device=device,
        parts=libraries.make_parts(replicas),
    )
    if not splits_backward(config):
        return Model(chunks, f"backward: whole, as {config.schedule_name} has no weight-gradient operations")
    report = split_weight_grad(chunks).report
    return Model(chunks, f"backward: split; of rank {dist.get_rank()}, {report}")
