"""Ranks as threads, and short runs of a small model with a test's own forward_step_func."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from megatron_pp.faults.attach import close_guard
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import forward_backward_no_pipelining
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, gradients_of, toy_chunks, toy_config

DATA = ToyData(4)
T = TypeVar("T")
POLICIES = [{"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {}]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=["overlap", "batched", "plain"])


@dataclass(frozen=True)
class Rank:
    """One rank of ``pipeline``, with its config and its communicator."""

    rank: int
    config: Any
    communicator: P2PCommunicator
    num_chunks: int
    data: ToyData

    @property
    def placement(self) -> Placement:
        return placement_of(self.config, self.communicator.size, self.num_chunks)

    def model(self, block: Callable[[int], torch.nn.Module] = ToyBlock) -> list[PipelineStage]:
        """The model chunks of this rank. ``block`` is called with the number of each stage."""
        return toy_chunks(self.placement, self.rank, self.config, block)

    def step(self, model: Sequence[Any], **more: Any) -> list[Any]:
        """Run one step. Returns the reports. ``more``: arguments of ``toy_step``, and of the schedule."""
        return toy_step(model, **{"data": self.data, "communicator": self.communicator, **more})

    def run(self, prepare: Callable[[list[PipelineStage]], Any] | None = None, **more: Any) -> ToyResult:
        """Run one step of a new model. Before it ``prepare`` is called with the model."""
        model = self.model()
        if prepare is not None:
            prepare(model)
        return self.result(model, self.step(model, **more))

    def result(self, model: Sequence[Any], reports: Sequence[Any]) -> ToyResult:
        stages = dict(zip(self.placement.stages[self.rank], model, strict=True))
        return ToyResult([float(report["loss"]) for report in reports], gradients_of(stages))


def pipeline(
    size: int,
    num_chunks: int,
    microbatches: int,
    body: Callable[[Rank], T],
    *,
    data: ToyData | None = None,
    network: MemoryNetwork | None = None,
    guarded: bool = False,
    timeout: float = 60.0,
    fields_of: Callable[[int], dict[str, Any]] = lambda rank: {},
    **fields: Any,
) -> list[T]:
    """Run ``body`` on each rank, which is a thread. Returns the results. ``fields``: fields of the config on all ranks;
    ``fields_of(rank)``: those of one rank. Raises the first exception of any rank. ``guarded``: under a fault guard.
    """
    one_way = fields.get("p2p_channels", "one_way") == "one_way"
    net = network or MemoryNetwork(size, one_way, store=dist.HashStore() if guarded else None)
    fields = {"virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None, **fields}
    data = data or ToyData(microbatches, variable=fields.get("variable_seq_lengths", False))

    def rank_main(rank: int) -> T:
        config = toy_config(**fields, **fields_of(rank))
        communicator = P2PCommunicator(ThreadGroup(rank, size), config, net.transport(rank))
        guards.callback(close_guard, communicator)
        with net.running(rank):
            return body(Rank(rank, config, communicator, num_chunks, data))

    with ExitStack() as guards:
        return run_ranks(size, rank_main, net.abort, timeout)


def loss_of(target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def forward_with(loss_func: Callable[[torch.Tensor], Any] | None, target_needed: bool = True) -> Any:
    """A forward_step_func whose loss function returns ``loss_func(loss of the microbatch)``."""

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
    """Run one step. Returns the reports of every rank, and the blocks of all stages in order. ``more``: further
    arguments of the schedule."""
    blocks = [block(stage) for stage in range(size * chunks)]

    def step_of(rank: Rank) -> list[Any]:
        return rank.step(list(map(wrap, rank.model(blocks.__getitem__))), forward_step_func=step, **(more or {}))

    return pipeline(size, chunks, data.num_microbatches, step_of, data=data, **fields), blocks


def result_of(reports: list[list[Any]], blocks: list[torch.nn.Module]) -> ToyResult:
    """The result of ``in_pipeline``, for a comparison. Only the last rank may have reports."""
    assert reports[:-1] == [[]] * (len(reports) - 1)
    return ToyResult([float(report["loss"]) for report in reports[-1]], gradients_of(dict(enumerate(blocks))))


def reference(stages: int, total: Callable[[list[torch.Tensor]], torch.Tensor]) -> list[torch.nn.Module]:
    """The blocks after the backward of ``total(losses of all microbatches)`` in one process."""
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
