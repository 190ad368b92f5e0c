"""Training steps of the toy model, one after the other, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.toy import ToyBlock, ToyResult, merged
from megatron_pp.weight_grad import split_weight_grad
from testkit.thread_runs.step_runs import Rank, pipeline


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
    """Run ``steps`` training steps, whose gradients add up. ``before`` is called before each step with the rank, the
    step and the config. ``split``: with converted chunks. ``fields``: fields of the config.
    """

    def train(rank: Rank) -> ToyResult:
        chunks = rank.model(block)
        reports = []
        if split:
            split_weight_grad(chunks)
        for step in range(1, steps + 1):
            before(rank.rank, step, rank.config)
            reports += rank.step(chunks)
        return rank.result(chunks, reports)

    return merged(pipeline(network.size, num_chunks, microbatches, train, network=network, **fields))
