"""Every schedule with split backwards and overlapped pairs, ranks as threads: losses and gradients of one process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from megatron_pp.common import log_once
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.pairs.pair_instructions import PAIR, pair_up
from megatron_pp.features.pairs.pair_runner import HalfCall, in_turn
from megatron_pp.plan.builder import verified_plan
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.own_host import OwnHost
from megatron_pp.runtime.run_step import prepared
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import (
    TOY_SCHEDULES,
    ToyData,
    reference_run,
    toy_chunks,
    toy_config,
    toy_forward_step,
)
from megatron_pp.weight_grad import WeightGradStore, split_weight_grad
from testkit.thread_runs.step_runs import Rank, pipeline

NAMED = [name for name, family in TOY_SCHEDULES.items() if family.search is None]
SPLITTING = [name for name in NAMED if TOY_SCHEDULES[name].splits_weight]
OVERLAP = {"overlap_p2p_comm": True}


def chunks_of(name: str, wanted: int = 2) -> int:
    return TOY_SCHEDULES[name].chunks or wanted


# -- memory and order --------------------------------------------------------------------------------------------------


class _WatchedStore(WeightGradStore):
    """Notes the most that ever waited at once, and the order of W."""

    most = 0
    order: list[tuple[int, int]]

    def run(self, chunk: int, mb: int) -> None:
        self.most = max(self.most, len(self.waiting()))
        self.order.append((chunk, mb))
        super().run(chunk, mb)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITTING)
def test_weight_gradients_wait_as_the_plan_says(name: str) -> None:
    size, chunks, microbatches = 4, chunks_of(name), 10

    def watch(rank: Rank) -> Any:
        model = rank.model()
        store: Any = split_weight_grad(model)
        store.__class__, store.order = _WatchedStore, []
        rank.step(model)
        return store

    stores = pipeline(size, chunks, microbatches, watch, pipeline_schedule=name, **OVERLAP)
    plan, verdict = verified_plan(PlanSpec(name, size, chunks, microbatches))
    for rank, peaks in enumerate(verdict.ranks):
        split = [(i.chunk, i.mb) for i in plan.programs[rank] if i.op == "W"]
        assert [key for key in stores[rank].order if key in set(split)] == split
        assert stores[rank].most == max(1, peaks.each.weight_backlog)


# -- overlapped pairs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dualpipe_v", "1f1b", "interleaved_1f1b", "1f1b_v"])
def test_a_function_of_the_users_runs_every_pair(name: str) -> None:
    """``test_differential.py`` has the numbers of functions that run the backward first."""
    pairs: list[tuple[HalfCall, HalfCall]] = []

    def recorded(forward_call: HalfCall, backward_call: HalfCall) -> None:
        assert isinstance(forward_call.model, torch.nn.Module)
        pairs.append((forward_call, backward_call))
        in_turn(forward_call, backward_call)

    run_in_threads(
        3, chunks_of(name), ToyData(8), pipeline_schedule=name, overlapped_forward_backward=recorded, **OVERLAP
    )
    plan, _ = verified_plan(PlanSpec(name, 3, chunks_of(name), 8, overlap_pairs=True))
    wanted = sum(at.op == PAIR for order in plan.orders for at in pair_up(order))
    assert len(pairs) == wanted > 0 if name == "dualpipe_v" else 0 < len(pairs) <= wanted
    assert all(forward.microbatch != backward.microbatch for forward, backward in pairs)


def _forget_backward(forward_call: HalfCall, backward_call: HalfCall) -> None:
    forward_call()


def _forward_twice(forward_call: HalfCall, backward_call: HalfCall) -> None:
    forward_call()
    forward_call()


@pytest.mark.parametrize(
    ("function", "message"),
    [(_forget_backward, "without having called the backward"), (_forward_twice, "microbatch . twice")],
)
def test_a_function_that_does_not_run_each_half_once_is_an_error(function: Any, message: str) -> None:
    with pytest.raises(ScheduleInputError, match=message):
        run_in_threads(
            2, 2, ToyData(5), pipeline_schedule="dualpipe_v", overlapped_forward_backward=function, **OVERLAP
        )


# -- models that do not split ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [OVERLAP, {"batch_p2p_comm": True}])
def test_ranks_with_and_without_a_converted_model_run_one_schedule(policy: dict[str, bool]) -> None:
    converted: list[Any] = []

    def convert_the_first(chunks: Any) -> None:
        if not converted:
            converted.append(chunks)
            split_weight_grad(chunks)

    data = ToyData(7)
    result = run_in_threads(3, 2, data, prepare=convert_the_first, pipeline_schedule="zb_v", **policy)
    assert result.difference(reference_run(6, data)) == 0.0


@pytest.mark.parametrize(
    ("name", "converted", "split"), [("zb_h1", False, False), ("zb_h1", True, True), ("1f1b", False, True)]
)
def test_a_model_that_does_not_split_gets_a_plan_without_w(name: str, converted: bool, split: bool) -> None:
    config = toy_config(pipeline_schedule=name)
    chunks = toy_chunks(Placement("loop", 1, 1), 0, config)
    if converted:
        split_weight_grad(chunks)
    arguments = {"forward_step_func": toy_forward_step, "data_iterator": None, "model": chunks[0]}
    host = OwnHost(StepInputs(False, num_microbatches=2, **arguments), alone=True)
    assert prepared(host).spec.split_backward is split


def test_switched_off_splitting_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once._log.cache_clear()  # another test of this process may have heard it
    with caplog.at_level(logging.WARNING, logger="megatron_pp"):
        for _ in range(2):
            run_in_threads(1, 1, ToyData(2), pipeline_schedule="zb_h1")  # without a pipeline nothing is lost
            run_in_threads(3, 1, ToyData(6), pipeline_schedule="zb_h2", **OVERLAP)
            run_in_threads(5, 2, ToyData(9), pipeline_schedule="dualpipe_v", prepare=split_weight_grad, **OVERLAP)
    said = [record.getMessage() for record in caplog.records]
    assert not any("zb_h1" in line for line in said)
    assert sum("schedule zb_h2 splits backwards, but the model is not converted" in line for line in said) == 1
    assert sum("DualPipeV needs at least 2 P = 10 microbatches and there are 9" in line for line in said) == 1
