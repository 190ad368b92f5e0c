"""Training steps of the toy model, one after the other, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, gradients_of, merged, toy_chunks, toy_config
from megatron_pp.weight_grad import split_weight_grad


def train_toy(
    network: MemoryNetwork,
    num_chunks: int = 1,
    *,
    steps: int,
    microbatches: int,
    split: bool = False,
    block: Any = ToyBlock,
    before: Callable[[int, int, Any], None] = lambda rank, step, config: None,
    **fields: Any,
) -> ToyResult:
    """``steps`` training steps; gradients add up. ``before`` each step it is called with the rank, the step and the
    config. ``split``: by converted chunks; ``fields``: of the config.
    """
    size, data = network.size, ToyData(microbatches, variable=fields.get("variable_seq_lengths", False))
    fields = {"virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None, **fields}

    def rank_main(rank: int) -> ToyResult:
        config = toy_config(**fields)
        communicator = P2PCommunicator(ThreadGroup(rank, size), config, network.transport(rank))
        placement = placement_of(config, size, num_chunks)
        chunks = toy_chunks(placement, rank, config, block)
        if split:
            split_weight_grad(chunks)
        losses: list[float] = []
        with network.running(rank):
            for step in range(1, steps + 1):
                before(rank, step, config)
                losses += [float(report["loss"]) for report in toy_step(chunks, data, communicator)]
        return ToyResult(losses, gradients_of(dict(zip(placement.stages[rank], chunks, strict=True))))

    return merged(run_ranks(size, rank_main, network.abort))
