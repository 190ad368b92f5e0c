"""Input gradients in static buffers of CUDA graphs: overwritten while their send is pending, unless that is settled."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_pp.runtime import run_step
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.adversarial_transports import LastMomentNetwork
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run
from testkit.device_runs.stream_runs import POLICIES, toy_step_on_streams
from testkit.models.graphed_layers import GraphedBlock, SettlesGradients, share_static_gradients

GRAPHED: dict[str, Any] = {"block": GraphedBlock, "prepare": share_static_gradients}
DATA = ToyData(8)
# (schedule, ranks, policy) of which a pending gradient is overwritten: releases move on by up to two operations.
UNSAFE = [
    *(("1f1b", 4, policy) for policy in ("overlap", "plain")),
    *(("zb_v", 2, policy) for policy in ("overlap", "plain")),
    ("interleaved_1f1b", 2, "overlap"),
]
SAFE = [("1f1b", 4, "batched"), ("interleaved_1f1b", 2, "batched")]


def wrong_gradients(schedule: str, size: int, policy: str) -> int:
    """How many gradients of parameters are not those of one process, where bytes are read as late as can be: of four
    orders in which the ranks may run, the worst."""
    chunks = 1 if schedule == "1f1b" else 2
    more = {**GRAPHED, **POLICIES[policy], "pipeline_schedule": schedule}
    expected = reference_run(size * chunks, DATA)
    wrong = []
    for seed in range(4):
        result = run_in_threads(size, chunks, DATA, network=LastMomentNetwork(size, seed=seed, pollable=True), **more)
        wrong.append(sum(bool((grad != expected.grads[name]).any()) for name, grad in result.grads.items()))
    return max(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "size", "policy"), UNSAFE)
def test_a_pending_gradient_is_overwritten(schedule: str, size: int, policy: str) -> None:
    report, _ = toy_step_on_streams(schedule, size, DATA, **GRAPHED, **POLICIES[policy])
    assert {race.kind for race in report.races} == {"read/write"}
    assert all("SEND_B" in race.first.instruction and race.second.what == "fill_" for race in report.races), str(report)
    assert wrong_gradients(schedule, size, policy) > 0


@pytest.mark.parametrize(("schedule", "size", "policy"), SAFE)
def test_a_pending_gradient_is_not_overwritten_if_sends_are_waited_for_at_their_round(
    schedule: str, size: int, policy: str
) -> None:
    report, difference = toy_step_on_streams(schedule, size, DATA, **GRAPHED, **POLICIES[policy])
    assert not report.races, str(report)
    assert difference == 0.0
    assert wrong_gradients(schedule, size, policy) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "size", "policy"), UNSAFE)
def test_a_pending_gradient_is_not_overwritten_if_sends_finish_before_the_next_but_one_backward(
    schedule: str, size: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def executor_for(communicator: Any) -> type[PlanExecutor]:
        return SettlesGradients

    monkeypatch.setattr(run_step, "executor_for", executor_for)
    report, difference = toy_step_on_streams(schedule, size, DATA, **GRAPHED, **POLICIES[policy])
    assert not report.races, str(report)
    assert difference == 0.0
    assert wrong_gradients(schedule, size, policy) == 0
