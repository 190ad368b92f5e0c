"""The transport for NCCL, its channels, the fault guard and tracing, as they are, on virtual devices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.comm.transport import ProcessGroupTransport
from megatron_pp.faults.attach import close_guard
from megatron_pp.runtime.pairs import on_two_streams
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.streams import StreamNetwork, StreamReport, virtual_cuda
from megatron_pp.testing.streams.process_group import process_group, virtual_distributed
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, merged, reference_run, toy_config
from tests.harness.stream_runs import POLICIES


@pytest.fixture(autouse=True)
def nccl_settings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    caplog.set_level(logging.WARNING, logger="megatron_pp")


def step_on_nccl(
    size: int,
    chunks: int,
    data: ToyData,
    *,
    block: Callable[[int], torch.nn.Module] = ToyBlock,
    errors: dict[int, str] | None = None,
    **fields: Any,
) -> tuple[StreamReport, ToyResult]:
    """A step over process groups; ``errors`` takes what ranks raise, which is raised where it is None."""
    network, store = StreamNetwork(size, seed=None), dist.HashStore()

    def rank_main(rank: int) -> ToyResult:
        config = toy_config(
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            variable_seq_lengths=data.variable,
            **fields,
        )
        with network.running(rank), process_group(network, rank, store) as group:
            communicator = P2PCommunicator(group, config)
            assert isinstance(communicator.transport, ProcessGroupTransport)
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
        results = run_ranks(size, rank_main, network.abort)
    return StreamReport.of(network, results), merged(results)


@pytest.mark.parametrize(
    "fields",
    [
        *POLICIES.values(),
        {"p2p_channels": "shared"},
        {"overlap_p2p_comm": True, "p2p_debug": True},
        {"overlap_p2p_comm": True, "pipeline_schedule": "dualpipe_v", "overlapped_forward_backward": on_two_streams},
    ],
    ids=[*POLICIES, "shared channels", "debug mode", "pairs on two streams"],
)
def test_steps(fields: dict[str, Any]) -> None:
    data = ToyData(4)
    report, result = step_on_nccl(2, 2, data, **fields)
    assert not report.races, str(report)
    assert result.difference(reference_run(4, data)) == 0.0


def test_variable_shapes_on_three_ranks() -> None:
    data = ToyData(4, variable=True)
    report, result = step_on_nccl(3, 1, data, overlap_p2p_comm=True)
    assert not report.races, str(report)
    assert result.difference(reference_run(3, data)) == 0.0


def test_tracing_with_events(tmp_path: Path) -> None:
    report, _ = step_on_nccl(2, 1, ToyData(4), overlap_p2p_comm=True, trace_dir=str(tmp_path), trace_steps="1")
    assert not report.races, str(report)
    assert len(list(tmp_path.glob("trace-*.jsonl"))) == 2


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


def test_a_failure_reaches_the_rank_whose_device_waits() -> None:
    """The guard aborts communicators: the device of rank 0 goes on, and the guard has the last word."""
    errors: dict[int, str] = {}
    step_on_nccl(2, 1, ToyData(4), overlap_p2p_comm=True, block=FailingBlock, errors=errors)
    assert errors[1] == "ValueError: this stage fails"
    assert errors[0].startswith("PipelinePeerError")
    assert "this stage fails" in errors[0]
