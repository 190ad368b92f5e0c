"""Steps of a small model whose output layer is split over all ranks. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp import PipelineStage, SplitOutputLayer
from megatron_pp.faults.attach import close_guard
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import HIDDEN, ToyBlock
from testkit.streams import StreamNetwork, StreamReport, virtual_cuda
from testkit.streams.call_log import CallLog
from testkit.thread_runs.step_runs import P2PCommunicator, ThreadGroup, toy_config
from testkit.virtual_groups import process_group, virtual_distributed

SEQ, BATCH = 3, 2


def mean_loss(losses: torch.Tensor) -> Any:
    return losses.mean(), {"loss": float(losses.detach().mean())}


@dataclass(frozen=True)
class Case:
    schedule: str
    size: int
    microbatches: int
    vocab: int = 11
    loss: Callable[[torch.Tensor], Any] = mean_loss
    dtype: torch.dtype = torch.float64
    given: Callable[[torch.Tensor, int], torch.Tensor] = lambda labels, rank: labels  # the function of a rank's labels

    def weight(self) -> torch.Tensor:
        return torch.randn(self.vocab, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=self.dtype)

    def data(self, rank: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(3)
        for _ in range(self.microbatches):
            x = torch.randn(SEQ, BATCH, HIDDEN, generator=draw, dtype=self.dtype)
            yield x, self.given(torch.randint(self.vocab, (SEQ, BATCH), generator=draw), rank)


class Stage(torch.nn.Module):
    def __init__(self, case: Case, rank: int, split: bool = True) -> None:
        super().__init__()
        self.block = ToyBlock(rank).to(case.dtype)
        if split:
            self.output = SplitOutputLayer(HIDDEN, case.vocab, rank, case.size, dtype=case.dtype)
            with torch.no_grad():
                self.output.weight.copy_(case.weight()[self.output.rows.start : self.output.rows.stop])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def step(
    case: Case,
    network: MemoryNetwork | None = None,
    split: bool = True,
    block: Any = Stage,
    group_of: Callable[[int], AbstractContextManager[Any]] | None = None,
    **more: Any,
) -> tuple[list[list[Any]], list[Stage]]:
    """Run one step. Returns the reports and stages of all ranks. ``group_of`` makes a rank's process group, which
    decides its transport."""
    stages = [block(case, rank, split) for rank in range(case.size)]
    network = network or MemoryNetwork(case.size)
    fields = {name: more.pop(name) for name in list(more) if name != "forward_only"}

    def forward_step(data: Any, model: Any) -> Any:
        x, labels = next(data)
        hidden = model(x)
        return (model.inner.output(hidden, labels) if split else hidden), case.loss

    def rank_main(rank: int) -> list[Any]:
        config = toy_config(pipeline_dtype=case.dtype, pipeline_schedule=case.schedule, **fields)
        given = nullcontext(ThreadGroup(rank, case.size)) if group_of is None else group_of(rank)
        with network.running(rank), given as group:
            transport = network.transport(rank) if group_of is None else None
            communicator = P2PCommunicator(group, config, transport)
            try:
                return get_forward_backward_func(case.size)(
                    forward_step_func=forward_step,
                    data_iterator=case.data(rank),
                    model=PipelineStage(stages[rank], config),
                    num_microbatches=case.microbatches,
                    seq_length=SEQ,
                    micro_batch_size=BATCH,
                    p2p_communicator=communicator,
                    **more,
                )
            finally:
                close_guard(communicator)
                communicator.transport.close()

    return run_ranks(case.size, rank_main, network.abort, 60.0), stages


def step_on_nccl(
    case: Case, log: CallLog | None = None, **more: Any
) -> tuple[StreamReport, list[list[Any]], list[Stage]]:
    """``step`` over the transport for NCCL, on virtual devices."""
    network = StreamNetwork(case.size, seed=None, log=log)
    store = dist.HashStore()
    with virtual_cuda(), virtual_distributed():
        reports, stages = step(case, network, group_of=lambda rank: process_group(network, rank, store), **more)
    return StreamReport.of(network, []), reports, stages
