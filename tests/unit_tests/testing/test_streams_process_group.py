"""The transport for NCCL, its channels, the fault guard and tracing, as they are, on virtual devices."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_pp.features.pairs.pair_runner import on_two_streams
from megatron_pp.testing.toy import ToyData, reference_run
from tests.harness.nccl_runs import FailingBlock, step_on_nccl
from tests.harness.stream_runs import POLICIES


@pytest.fixture(autouse=True)
def nccl_settings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    caplog.set_level(logging.WARNING, logger="megatron_pp")


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


def test_a_failure_reaches_the_rank_whose_device_waits() -> None:
    """The guard aborts communicators: the device of rank 0 goes on, and the guard has the last word."""
    errors: dict[int, str] = {}
    step_on_nccl(2, 1, ToyData(4), overlap_p2p_comm=True, block=FailingBlock, errors=errors)
    assert errors[1] == "ValueError: this stage fails"
    assert errors[0].startswith("PipelinePeerError")
    assert "this stage fails" in errors[0]
