"""Steps of the toy model over the transport for NCCL, on virtual devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.comm.nccl_transport import NcclTransport
from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.faults.attach import close_guard
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, merged, toy_config
from tests.harness.streams import DeviceRules, StreamNetwork, StreamReport, virtual_cuda
from tests.harness.streams.network import NO_MORE_RULES
from tests.harness.virtual_groups import process_group, virtual_distributed


def step_on_nccl(
    size: int,
    chunks: int,
    data: ToyData,
    *,
    block: Callable[[int], torch.nn.Module] = ToyBlock,
    errors: dict[int, str] | None = None,
    rules: DeviceRules = NO_MORE_RULES,
    device_id: bool = False,
    timeout: float = 60.0,
    **fields: Any,
) -> tuple[StreamReport, ToyResult]:
    """A step over process groups; ``errors`` takes what ranks raise, which is raised where it is None. ``device_id``:
    whether the job's group is made for a device; ``timeout``: of each rank, in seconds."""
    network, store = StreamNetwork(size, seed=None, rules=rules), dist.HashStore()

    def rank_main(rank: int) -> ToyResult:
        config = toy_config(
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            variable_seq_lengths=data.variable,
            **fields,
        )
        place = network.devices[rank].place if device_id else None
        with network.running(rank), process_group(network, rank, store, place) as group:
            communicator = P2PCommunicator(group, config)
            assert isinstance(communicator.transport, NcclTransport)
            assert (communicator.transport.backend, communicator.device.type) == ("nccl", "cuda")
            try:
                return run_rank(rank, size, chunks, data, config, communicator, block=block)
            except Exception as error:
                if errors is None:
                    raise
                errors[rank] = f"{type(error).__name__}: {error}"
                return ToyResult()
            finally:
                close_guard(communicator)
                communicator.transport.close()

    with virtual_cuda(), virtual_distributed():
        results = run_ranks(size, rank_main, network.abort, timeout)
    return StreamReport.of(network, results), merged(results)


class FailingBlock(ToyBlock):
    """Fails in its second forward, on the last stage."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.stage == 1 and self.calls == 2:
            raise ValueError("this stage fails")
        return super().forward(x)

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage
