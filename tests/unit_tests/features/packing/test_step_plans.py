"""Steps of unequal microbatches: numbers stay equal to the last bit, all ranks run the same plan, a failure is told."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import PipelineError, PipelineMismatchError, ScheduleInputError
from megatron_pp.features.packing import step_plans
from megatron_pp.features.packing.step_ahead import NextStep
from megatron_pp.features.packing.step_plans import PlansOfKinds, in_steps
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.runtime import run_step as step_module
from megatron_pp.runtime.step import Step
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.toy import ToyBlock, ToyResult
from testkit.thread_runs.toy_training import train_toy

EQUAL, ONE_LONG, ONE_SHORT = [1.0] * 6, [1.0, 4.1, 1.0, 1.0, 1.0, 1.0], [1.0] * 5 + [0.5]
Before = Callable[[int, int, Any], None]


def train(
    num_chunks: int = 1,
    *,
    size: int = 2,
    before: Before = lambda rank, step, config: None,
    store: Any = HashStore,
    **more: Any,
) -> ToyResult:
    network = MemoryNetwork(size, store=store and store())
    return train_toy(network, num_chunks, before=before, **{"steps": 6, "microbatches": 6, "split": True, **more})


def cycling(*kinds: list[float]) -> Before:
    """Costs of step k (from 1): those of the kinds in turn, as a list and as a function."""

    def before(rank: int, step: int, config: Any) -> None:
        costs = kinds[step % len(kinds)]
        config.microbatch_costs = costs if rank else lambda: costs

    return before


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The schedules of the steps of each of two ranks."""
    found: list[list[str]] = [[], []]
    make = step_module._executor

    def noted(step: Step, host: Any, plan: Any, *rest: Any) -> Any:
        found[step.communicator.rank].append(plan.spec.schedule)
        return make(step, host, plan, *rest)

    monkeypatch.setattr(step_module, "_executor", noted)
    return found


# --- numbers, and what is run


@pytest.mark.parametrize(
    ("schedule", "chunks", "split"),
    [("1f1b", 1, True), ("gpipe", 1, False), ("interleaved_1f1b", 2, True), ("auto", 1, True)],
)
def test_numbers_are_those_of_one_plan(schedule: str, chunks: int, split: bool, ran: list[list[str]]) -> None:
    fields = {"pipeline_schedule": schedule, "overlap_p2p_comm": True, "split": split}
    changed = train(chunks, before=cycling(ONE_LONG), **fields)
    assert ran[0] == ran[1]
    assert ran[0][0] == schedule, "the first step of a kind runs the plan of the settings"
    assert set(ran[0][1:]) == {"auto"}
    assert changed.difference(train(chunks, **fields)) == 0


def test_each_kind_has_its_plan_and_equal_microbatches_keep_the_settings_plan(
    ran: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked: list[NextStep] = []
    ask = step_plans.Planner.ask

    def noted(self: Any, number: int, step: NextStep) -> None:
        asked.append(step)
        ask(self, number, step)

    with mock.patch.object(step_plans.Planner, "ask", noted):
        changed = train(before=cycling(EQUAL, ONE_LONG, ONE_SHORT), steps=9, pipeline_schedule="1f1b")
    assert ran[0] == ran[1]
    assert set(ran[0][2::3]) == {"1f1b"}, "steps whose microbatches cost the same"
    assert ran[0][:2] == ["1f1b", "1f1b"]
    assert ran[0][3] == ran[0][6] == "auto"
    assert {step.costs for step in asked} == {(1.0, 4.0, *[1.0] * 4), (*[1.0] * 5, 0.5)}
    assert len(asked) == 2 * 2, "once for each kind on each rank"
    assert all(step.keeps_order for step in asked)
    said = [record.getMessage() for record in caplog.records]
    assert sum("microbatch_costs: for microbatches that take 1, 4, 1, 1, 1, 1: from 1f1b" in line for line in said) == 1
    assert changed.difference(train(steps=9, pipeline_schedule="1f1b")) == 0


def test_costs_are_rounded_so_that_similar_steps_run_one_plan() -> None:
    assert in_steps([2.0, 2.1, 1.9]) == ()
    assert in_steps([1.0, 4.2, 1.1, 0.5, 1.0]) == (1.0, 4.0, 1.0, 0.5, 1.0)
    assert in_steps([10.0, 41.0, 10.5, 5.2, 9.9]) == (1.0, 4.0, 1.0, 0.5, 1.0)


def test_kinds_that_did_not_run_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch, ran: list[list[str]]) -> None:
    monkeypatch.setattr(step_plans, "_KINDS", 1)
    changed = train(before=cycling(ONE_LONG, ONE_SHORT), steps=8, pipeline_schedule="1f1b")
    assert ran[0] == ran[1]
    assert changed.difference(train(steps=8, pipeline_schedule="1f1b")) == 0


@pytest.mark.parametrize(
    ("fields", "chunks", "draws"),
    [
        ({}, [nn.Linear(1, 1), nn.Linear(1, 1)], False),
        ({}, [nn.Linear(1, 1), nn.Sequential(nn.Dropout(0.1))], True),
        ({}, [nn.Sequential(nn.Dropout(0.1))], False),
        ({"hidden_dropout": 0.1}, [nn.Linear(1, 1), nn.Linear(1, 1)], True),  # a function of the model's, as Megatron's
        ({"attention_dropout": 0.1}, [nn.Linear(1, 1), nn.Linear(1, 1)], True),
    ],
)
def test_chunks_with_dropout_keep_their_turns(fields: dict[str, Any], chunks: list[nn.Module], draws: bool) -> None:
    settings = StepSettings.from_config(SimpleNamespace(microbatch_costs=[1.0, 2.0], **fields))
    assert PlansOfKinds(settings, chunks).draws == draws


# --- searches that fail, or ranks that differ


def test_a_search_that_dies_is_the_error_of_all_ranks() -> None:
    ask = step_plans.Planner.ask

    def dies(self: Any, number: int, step: NextStep) -> None:
        ask(self, number, step)
        self.child.process.kill()
        self.child.process.wait()

    began = time.monotonic()
    with mock.patch.object(step_plans.Planner, "ask", dies), pytest.raises(PipelineError, match="ended with code -9"):
        train(before=cycling(ONE_LONG))
    assert time.monotonic() - began < 30.0


def test_a_search_that_hangs_on_one_rank_ends_after_the_timeout() -> None:
    ask = step_plans.Planner.ask
    stopped: list[Any] = []

    def stops(self: Any, number: int, step: NextStep) -> None:
        ask(self, number, step)
        if not stopped:
            stopped.append(self.child.process)
            self.child.process.send_signal(signal.SIGSTOP)

    with mock.patch.object(step_plans.Planner, "ask", stops), pytest.raises(PipelineError, match="plans steps of uneq"):
        train(before=cycling(ONE_LONG), p2p_timeout=2.0)
    stopped[0].send_signal(signal.SIGCONT)


def test_ranks_that_found_different_plans_are_told_apart() -> None:
    def before(rank: int, step: int, config: Any) -> None:
        config.microbatch_costs = [1.0, 4.0, 1.0, 1.0, 1.0, 1.0] if rank else [1.0, 1.0, 1.0, 4.0, 1.0, 1.0]

    with pytest.raises(PipelineMismatchError):
        train(before=before)


def test_ranks_that_do_not_all_have_costs() -> None:
    def before(rank: int, step: int, config: Any) -> None:
        config.microbatch_costs = ONE_LONG if rank else None

    with pytest.raises(PipelineMismatchError, match="microbatch_costs: rank 0 has none, rank 1 has given"):
        train(before=before, steps=2)


# --- what is refused


@pytest.mark.parametrize("costs", [[1.0] * 5, [1.0] * 5 + [0.0], [1.0] * 5 + [float("nan")], [1.0] * 5 + ["a"], []])
def test_impossible_microbatch_costs_are_refused(costs: list[Any]) -> None:
    with pytest.raises(ScheduleInputError, match=r"microbatch_costs is .* it must be 6 finite numbers above 0"):
        train(microbatch_costs=costs, steps=1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pipeline_schedule": "pipe_offload", "chunks": 2}, "activations are offloaded"),
        ({"offload_chunks": 1}, "activations are offloaded"),
        ({"sequence_slices": 3}, "sequences are cut into slices"),
        ({"overlapped_forward_backward": in_turn}, "pairs of a forward and a backward run as one"),
        ({"skip_tensors": "skip=0>1"}, "tensors skip stages"),
        ({"cuda_graph_impl": "transformer_engine"}, "config.cuda_graph_impl is 'transformer_engine', whose graphs"),
        ({"cuda_graph_impl": "local"}, "config.cuda_graph_impl is 'local', whose graphs share memory"),
        ({"fine_grained_activation_offloading": True}, "config.fine_grained_activation_offloading is set, by which"),
        ({"moe_paged_stash": True}, "config.moe_paged_stash is set, by which Megatron finds"),
    ],
)
def test_runs_whose_steps_cannot_have_plans_of_their_own(fields: dict[str, Any], why: str) -> None:
    chunks = fields.pop("chunks", 1)
    with pytest.raises(ScheduleInputError, match=f"cannot have plans of their own: {why}"):
        train(chunks, microbatch_costs=ONE_LONG, steps=1, **fields)


def test_microbatch_costs_are_refused_if_chunks_share_a_parameter() -> None:
    shared = torch.nn.Parameter(torch.zeros(1))

    class Tied(ToyBlock):
        def __init__(self, stage: int) -> None:
            super().__init__(stage)
            self.tied = shared

    with pytest.raises(ScheduleInputError, match="chunks of a rank share a parameter"):
        train(2, block=Tied, microbatch_costs=ONE_LONG, steps=1)


def test_evaluation_and_one_rank_have_nothing_to_plan() -> None:
    assert len(train(size=1, microbatch_costs=ONE_LONG, steps=2).losses) == 12
