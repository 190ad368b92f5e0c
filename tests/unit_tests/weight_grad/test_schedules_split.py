"""Every schedule with split backwards and overlapped pairs, ranks as threads: losses and gradients of one process."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.pairs.pair_runner import HalfCall
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import verified_plan
from megatron_pp.plan.ir.instruction import PAIR, pair_up
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime import log_once
from megatron_pp.runtime.step import StepCall
from megatron_pp.testing.pipeline import run_in_threads, run_rank, toy_step
from megatron_pp.testing.toy import (
    TOY_SCHEDULES,
    ToyBlock,
    ToyData,
    gradients_of,
    reference_run,
    toy_chunks,
    toy_config,
    toy_forward_step,
)
from megatron_pp.weight_grad import WeightGradStore, split_weight_grad
from tests.harness.step_runs import on_ranks

NAMED = [name for name, family in TOY_SCHEDULES.items() if family.search is None]
SPLITTING = [name for name in NAMED if TOY_SCHEDULES[name].splits_weight]
OVERLAP = {"overlap_p2p_comm": True}


def chunks_of(name: str, wanted: int = 2) -> int:
    return TOY_SCHEDULES[name].chunks or wanted


def test_impossible_measurements_are_refused_before_the_step() -> None:
    with pytest.raises(ScheduleInputError, match=r"config\.pipeline_measured: measured weight is '?-1"):
        run_in_threads(2, 1, ToyData(2), pipeline_schedule="auto", pipeline_measured={"weight": -1}, **OVERLAP)


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
    stores: dict[int, _WatchedStore] = {}

    def watch(rank: int, stages: list[Any]) -> None:
        store = split_weight_grad(stages)
        store.__class__ = _WatchedStore
        stores[rank] = store  # type: ignore[assignment]
        stores[rank].order = []

    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> Any:
        return run_rank(rank, size, chunks, ToyData(microbatches), config, communicator, prepare=partial(watch, rank))

    virtual = chunks if chunks > 1 else None
    on_ranks(size, rank_main, pipeline_schedule=name, virtual_pipeline_model_parallel_size=virtual, **OVERLAP)
    plan, verdict = verified_plan(PlanSpec(name, size, chunks, microbatches))
    for rank, peaks in enumerate(verdict.ranks):
        split = [(i.chunk, i.mb) for i in plan.programs[rank] if i.op == "W"]
        assert [key for key in stores[rank].order if key in set(split)] == split
        assert stores[rank].most == max(1, peaks.each.weight_backlog)


# -- several steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zb_h1", "interleaved_zb", "zb_v", "dualpipe_v"])
def test_two_steps_without_zero_grad_give_twice_the_gradient_and_evaluation_touches_none(name: str) -> None:
    size, chunks, data = 2, chunks_of(name), ToyData(5)
    placement = Placement(TOY_SCHEDULES[name].placement, size, chunks)
    virtual = chunks if chunks > 1 else None

    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> dict[str, torch.Tensor]:
        stages = toy_chunks(placement, rank, config)
        split_weight_grad(stages)
        for forward_only in (False, True, False):
            before = {n: g.clone() for n, g in gradients_of(dict(enumerate(stages))).items()}
            toy_step(stages, data, communicator, forward_only=forward_only)
            if forward_only:
                after = gradients_of(dict(enumerate(stages)))
                assert all(torch.equal(after[n], g) for n, g in before.items())
        return gradients_of(dict(zip(placement.stages[rank], stages, strict=True)))

    fields = {"pipeline_schedule": name, "virtual_pipeline_model_parallel_size": virtual, **OVERLAP}
    twice = {key: grad for of_rank in on_ranks(size, rank_main, **fields) for key, grad in of_rank.items()}
    once = reference_run(size * chunks, data).grads
    assert twice.keys() == once.keys()
    for parameter, grad in once.items():
        torch.testing.assert_close(twice[parameter], 2 * grad, rtol=1e-6, atol=1e-7)


class _CheckpointedBlock(torch.nn.Module):
    """A stage under activation checkpointing, which counts its forwards."""

    counts: Counter[int]

    def __init__(self, stage: int, counts: Counter[int]) -> None:
        super().__init__()
        self.stage = stage
        self.counts = counts
        self.block = ToyBlock(stage)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        self.counts[self.stage] += 1
        return self.block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self._run, x, use_reentrant=False)


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v"])
def test_with_checkpointing_every_layer_runs_forward_twice_per_microbatch(name: str) -> None:
    size, chunks, microbatches = 2, chunks_of(name), 5
    counts: Counter[int] = Counter()
    data = ToyData(microbatches)
    result = run_in_threads(
        size,
        chunks,
        data,
        prepare=split_weight_grad,
        block=lambda stage: _CheckpointedBlock(stage, counts),
        pipeline_schedule=name,
        **OVERLAP,
    )
    assert counts == dict.fromkeys(range(size * chunks), 2 * microbatches)
    reference = reference_run(size * chunks, data)
    assert result.losses == reference.losses
    for parameter, grad in reference.grads.items():
        stage, _, rest = parameter.partition(".")
        assert torch.equal(result.grads[f"{stage}.block.{rest}"], grad), parameter


# -- overlapped pairs --------------------------------------------------------------------------------------------------


class _Recorder:
    """An ``overlapped_forward_backward`` that notes its pairs and runs the backward first."""

    def __init__(self) -> None:
        self.pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []

    def __call__(self, forward_call: HalfCall, backward_call: HalfCall) -> None:
        assert isinstance(forward_call.model, torch.nn.Module)
        self.pairs.append(
            ((forward_call.chunk, forward_call.microbatch), (backward_call.chunk, backward_call.microbatch))
        )
        backward_call()
        forward_call()


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("name", ["dualpipe_v", "1f1b", "interleaved_1f1b", "1f1b_v"])
def test_a_function_of_the_users_runs_every_pair(name: str, convert: bool) -> None:
    size, chunks, data = 3, chunks_of(name), ToyData(8)
    recorder = _Recorder()
    result = run_in_threads(
        size,
        chunks,
        data,
        prepare=split_weight_grad if convert else None,
        pipeline_schedule=name,
        overlapped_forward_backward=recorder,
        **OVERLAP,
    )
    assert result.difference(reference_run(size * chunks, data)) == 0.0
    plan, _ = verified_plan(PlanSpec(name, size, chunks, data.num_microbatches, overlap_pairs=True))
    wanted = sum(at.op == PAIR for order in plan.orders for at in pair_up(order))
    assert len(recorder.pairs) == wanted > 0 if name == "dualpipe_v" else 0 < len(recorder.pairs) <= wanted
    assert all(forward[1] != backward[1] for forward, backward in recorder.pairs)


def _forget_backward(forward_call: HalfCall, backward_call: HalfCall) -> None:
    forward_call()


def _forward_twice(forward_call: HalfCall, backward_call: HalfCall) -> None:
    forward_call()
    forward_call()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_forget_backward, "without having called the backward"),
        (_forward_twice, "microbatch . twice"),
    ],
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
    assert StepCall(chunked=False, alone=True, num_microbatches=2, **arguments).spec.split_backward is split


# -- what is said ------------------------------------------------------------------------------------------------------


def test_what_is_off_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once._log.cache_clear()  # another test of this process may have heard it
    with caplog.at_level(logging.WARNING, logger="megatron_pp"):
        for _ in range(2):
            run_in_threads(1, 1, ToyData(2), pipeline_schedule="zb_h1")  # without a pipeline nothing is lost
            run_in_threads(3, 1, ToyData(6), pipeline_schedule="zb_h2", **OVERLAP)
            run_in_threads(5, 2, ToyData(9), pipeline_schedule="dualpipe_v", prepare=split_weight_grad, **OVERLAP)
    said = [record.getMessage() for record in caplog.records]
    assert not any("zb_h1" in line for line in said)
    assert sum("schedule zb_h2 splits backwards, but the model does all of each at once" in line for line in said) == 1
    assert sum("DualPipeV needs at least 2 P = 10 microbatches and there are 9" in line for line in said) == 1
