"""Drawn jobs of several steps with many settings at once, on virtual devices: no race, no hang, the numbers of one
process, and no memory kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pp.config import device_rules
from megatron_pp.plan.ir.spec import ONE_QUEUE
from megatron_pp.runtime.engine.compute import LossRecord
from testkit import autograd_draw
from testkit.device_runs import drawn_jobs
from testkit.device_runs.drawn_jobs import drawn_job
from testkit.sweeps import EXHAUSTIVE


@pytest.fixture(autouse=True)
def nccl_settings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    caplog.set_level(logging.WARNING, logger="megatron_pp")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(400 if EXHAUSTIVE else 4))
def test_a_drawn_job_has_no_race_and_the_numbers_of_one_process(number: int, tmp_path: Path) -> None:
    drawn_job(f"{autograd_draw.said()} {number}", str(tmp_path)).check()


# -- faults that drawn jobs find. The seeds are those of jobs that have what it takes. ---------------------------------


def test_a_new_sum_of_tokens_for_each_microbatch_is_a_race(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pairs on two streams read the old sum, whose memory is free. Until November 2026 the engine did this."""

    def set_copy(record: LossRecord, name: str, value: Any) -> None:
        object.__setattr__(record, name, value + 0 if isinstance(value, torch.Tensor) else value)

    monkeypatch.setattr(LossRecord, "__setattr__", set_copy, raising=False)
    with pytest.raises(AssertionError, match=r"add.* in F1\.3 \(rank 2, stream \d\); then, not ordered"):
        drawn_job("job 1259", str(tmp_path)).check()


def test_plans_for_no_waiting_device_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_rules, "device_rules", lambda settings: (ONE_QUEUE,))
    with pytest.raises(RuntimeError, match=r"the device of rank 2 hangs at torch\.cuda\.synchronize"):
        drawn_job("job 2028", str(tmp_path)).check()


def test_a_kept_model_is_kept_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Any] = []

    def keep(*args: Any, **more: Any) -> Any:
        chunks = made(*args, **more)
        kept.append(chunks)
        return chunks

    made = drawn_jobs.toy_chunks
    monkeypatch.setattr(drawn_jobs, "toy_chunks", keep)
    with pytest.raises(AssertionError, match="blocks of memory that ranks still use"):
        drawn_job("job 19", str(tmp_path)).check()


def test_a_lost_scale_is_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drawn_jobs, "_scaled", lambda scale, loss: loss)
    with pytest.raises(AssertionError, match=r"step \d of replica 0 differs by"):
        drawn_job("job 19", str(tmp_path)).check()
