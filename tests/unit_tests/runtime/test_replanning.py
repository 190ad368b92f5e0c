"""A run that plans anew: numbers stay equal to the last bit, all ranks change together, and no step waits for a search."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, gradients_of, merged, toy_chunks, toy_config
from megatron_pp.weight_grad import split_weight_grad

def train(
    size: int = 2,
    num_chunks: int = 1,
    *,
    steps: int = 16,
    microbatches: int = 6,
    split: bool = True,
    each: Callable[[int, int], dict[str, Any]] = lambda rank, step: {},
    **fields: Any,
) -> ToyResult:
    """``steps`` training steps of the toy model, ranks as threads; gradients add up."""
    network = MemoryNetwork(size, store=HashStore())
    data = ToyData(microbatches)
    fields = {"virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None, **fields}

    def rank_main(rank: int) -> ToyResult:
        config = toy_config(**fields)
        communicator = P2PCommunicator(ThreadGroup(rank, size), config, network.transport(rank))
        placement = placement_of(config, size, num_chunks)
        chunks = toy_chunks(placement, rank, config, ToyBlock)
        if split:
            split_weight_grad(chunks)
        losses: list[float] = []
        for step in range(steps):
            for name, value in each(rank, step).items():
                setattr(config, name, value)
            time.sleep(0.2)
            losses += [float(report["loss"]) for report in toy_step(chunks, data, communicator)]
        return ToyResult(losses, gradients_of(dict(zip(placement.stages[rank], chunks, strict=True))))

    return merged(run_ranks(size, rank_main, network.abort))


def test_plain(caplog):
    caplog.set_level(logging.INFO)
    a=train(pipeline_schedule="1f1b", pipeline_replan="every:2")
    for r in caplog.records: print(r.created, r.message[:300])
