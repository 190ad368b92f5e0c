"""Steps of the toy model over the transport for NCCL, on virtual devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_pp.comm.nccl.nccl_transport import NcclTransport
from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.faults.attach import close_guard
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, merged, toy_config
from testkit.streams import DeviceRules, StreamNetwork, StreamReport, virtual_cuda
from testkit.streams.network import NO_MORE_RULES
from testkit.virtual_groups import process_group, virtual_distributed

T = TypeVar("T")


def on_nccl(
    network: StreamNetwork,
    body: Callable[[P2PCommunicator], T],
    *,
    device_id: bool = False,
    timeout: float = 60.0,
    **fields: Any,
) -> list[T]:
    """Run ``body(communicator)`` on each rank, with process groups on ``network``. Returns the results by rank.
    ``fields``: fields of the config. ``device_id``: whether the job's group is made for a device. ``timeout``: of each
    rank, in seconds."""
    store = dist.HashStore()

    def rank_main(rank: int) -> T:
        place = network.devices[rank].place if device_id else None
        with network.running(rank), process_group(network, rank, store, place) as group:
            communicator = P2PCommunicator(group, toy_config(**fields))
            try:
                return body(communicator)
            finally:
                close_guard(communicator)
                communicator.transport.close()

    with virtual_cuda(), virtual_distributed():
        return run_ranks(network.size, rank_main, network.abort, timeout)


def step_on_nccl(
    size: int,
    chunks: int,
    data: ToyData,
    *,
    block: Callable[[int], torch.nn.Module] = ToyBlock,
    errors: dict[int, str] | None = None,
    rules: DeviceRules = NO_MORE_RULES,
    **more: Any,
) -> tuple[StreamReport, ToyResult]:
    """Run a step over process groups. ``errors`` receives the errors of ranks; if it is None, they are raised.
    ``more``: options of ``on_nccl``."""
    network = StreamNetwork(size, seed=None, rules=rules)

    def step(communicator: P2PCommunicator) -> ToyResult:
        rank = communicator.rank
        assert isinstance(communicator.transport, NcclTransport)
        assert (communicator.transport.backend, communicator.device.type) == ("nccl", "cuda")
        try:
            return run_rank(rank, size, chunks, data, communicator.config, communicator, block=block)
        except Exception as error:
            if errors is None:
                raise
            errors[rank] = f"{type(error).__name__}: {error}"
            return ToyResult()

    more |= {"virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
    results = on_nccl(network, step, variable_seq_lengths=data.variable, **more)
    return StreamReport.of(network, results), merged(results)


class FailingBlock(ToyBlock):
    """A stage that raises in its second forward, if it is the last stage."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.stage == 1 and self.calls == 2:
            raise ValueError("this stage fails")
        return super().forward(x)

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage
