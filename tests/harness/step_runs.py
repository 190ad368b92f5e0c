"""Ranks as threads, and short runs of a small model whose forward_step_func a test brings along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import forward_backward_no_pipelining
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import toy_step
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, gradients_of, toy_config

DATA = ToyData(4)
T = TypeVar("T")
POLICIES = [{"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {}]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=["overlap", "batched", "plain"])


def on_ranks(
    size: int,
    body: Callable[[int, Any, P2PCommunicator], T],
    *,
    guarded: bool = False,
    timeout: float = 60.0,
    fields_of: Callable[[int], dict[str, Any]] = lambda rank: {},
    **fields: Any,
) -> list[T]:
    """What ``body(rank, config, communicator)`` returns on each rank; ``fields`` are the config's, on all ranks, and
    ``fields_of(rank)`` on one. Raises the first exception of any rank. ``guarded``: under a fault guard.
    """
    one_way = fields.get("p2p_channels", "one_way") == "one_way"
    network = MemoryNetwork(size, one_way, store=dist.HashStore() if guarded else None)

    def rank_main(rank: int) -> T:
        config = toy_config(**fields, **fields_of(rank))
        return body(rank, config, P2PCommunicator(ThreadGroup(rank, size), config, network.transport(rank)))

    return run_ranks(size, rank_main, network.abort, timeout)


def loss_of(target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def forward_with(loss_func: Callable[[torch.Tensor], Any] | None, target_needed: bool = True) -> Any:
    """A forward_step_func whose loss function is ``loss_func(loss of the microbatch)``."""

    def step(data_iterator: Any, model: Any) -> Any:
        x, target = next(data_iterator)
        if loss_func is None:
            return model(x), None
        return model(x), lambda output, **more: loss_func(loss_of(target, output), **more)

    return step


def alone(step: Any, config: Any = None, module: Any = None, **more: Any) -> list[Any]:
    config = config or toy_config()
    return forward_backward_no_pipelining(
        forward_step_func=step,
        data_iterator=DATA.iterator(),
        model=module or PipelineStage(ToyBlock(0), config),
        num_microbatches=DATA.num_microbatches,
        **more,
    )


def in_pipeline(
    size: int,
    step: Any,
    *,
    chunks: int = 1,
    block: Callable[[int], torch.nn.Module] = ToyBlock,
    wrap: Callable[[PipelineStage], Any] = lambda stage: stage,
    data: ToyData = DATA,
    more: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[list[list[Any]], list[torch.nn.Module]]:
    """Reports of every rank, and the blocks of all stages in order. ``more``: further arguments of the schedule."""
    blocks = [block(stage) for stage in range(size * chunks)]

    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> list[Any]:
        model = [wrap(PipelineStage(blocks[c * size + rank], config, c)) for c in range(chunks)]
        return toy_step(model, data, communicator, forward_step_func=step, **(more or {}))

    chunked = chunks if chunks > 1 else None
    return on_ranks(size, rank_main, virtual_pipeline_model_parallel_size=chunked, **fields), blocks


def result_of(reports: list[list[Any]], blocks: list[torch.nn.Module]) -> ToyResult:
    """What ``in_pipeline`` gave, to be compared; only the last rank may have reported."""
    assert reports[:-1] == [[]] * (len(reports) - 1)
    return ToyResult([float(report["loss"]) for report in reports[-1]], gradients_of(dict(enumerate(blocks))))


def reference(stages: int, total: Callable[[list[torch.Tensor]], torch.Tensor]) -> list[torch.nn.Module]:
    """Blocks after the backward of ``total(losses of all microbatches)`` in one process."""
    blocks = [ToyBlock(stage) for stage in range(stages)]
    losses = []
    for x, target in DATA.iterator():
        for block in blocks:
            x = block(x)
        losses.append(loss_of(target, x))
    total(losses).backward()
    return blocks


def assert_same_gradients(blocks: list[torch.nn.Module], expected: list[torch.nn.Module]) -> None:
    for mine, theirs in zip(blocks, expected, strict=True):
        for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None, name
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)
