"""Named tensors that skip stages: losses and gradients of a run without a pipeline, whatever the schedule and route."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.errors import ConfigError, P2PShapeError, ScheduleInputError
from megatron_pp.features.skip_tensors.routes import SkipTensor, skip_tensors
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run
from testkit.models.skip_block import SkipBlock
from testkit.thread_runs.p2p_ranks import NothingMayPass


class DoubleData(ToyData):
    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().microbatch(mb)
        return x.double(), target.double()


class Wide(torch.nn.Module):
    """Gives, besides its output, one of its own shape and dtype; the last stage uses both."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.scale = torch.nn.Parameter(torch.full((4,), 1.0 + stage, dtype=torch.float64))

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> object:
        x = x * self.scale
        if self.stage == 0:
            return x, {"wide": torch.cat([x, -x], -1).float(), "rows": torch.arange(3)}
        if self.stage == 2:
            x = (x + named["wide"][..., 4:].double()).index_select(0, named["rows"].flip(0))
        return x


def test_shapes_and_dtypes_by_name():
    tensors = [
        SkipTensor("wide", 0, (2,), shape=(3, 2, 8), dtype="float32"),
        SkipTensor("rows", 0, (2,), False, (3,), "int64"),
    ]
    runs = [
        run_in_threads(3, 1, DoubleData(4), block=Wide, skip_tensors=tensors, pipeline_dtype=torch.float64, **more)
        for more in ({}, {"overlap_p2p_comm": True}, {"p2p_debug": True})
    ]
    x, target = DoubleData(4).microbatch(0)
    loss = ((x * 6 - x.float().double()).flip(0) - target).pow(2).mean()
    assert runs[0].losses[0] == pytest.approx(float(loss))
    assert all(set(one.grads) == {f"{stage}.scale" for stage in range(3)} for one in runs)
    assert all(one.difference(runs[0]) == 0.0 for one in runs)


class Broken(SkipBlock):
    fault = ""

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> object:
        output = super().forward(x, **named)
        if not isinstance(output, tuple):
            return output
        value, made = output
        if self.fault == "none":
            return value
        if self.fault == "name":
            return value, {"other": made["a"]}
        return value, {"a": {"shape": made["a"][:1], "dtype": made["a"].float(), "list": [1]}[self.fault]}


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("none", ScheduleInputError, r"stage 0 gave a Tensor; config.skip_tensors says .* dict of a\)"),
        ("name", ScheduleInputError, r"gave \(output, dict of other\)"),
        ("shape", P2PShapeError, r"tensor a of stage 0 for microbatch 0 has shape \[1, 2, 4\] .* expect \[3, 2, 4\]"),
        ("dtype", P2PShapeError, "of torch.float32, but later stages expect .* of torch.float64"),
        ("list", ScheduleInputError, "gave a list as a, not a tensor"),
    ],
)
def test_a_stage_that_gives_something_else_is_named(fault, error, words, monkeypatch):
    monkeypatch.setattr(Broken, "fault", fault)
    tensors = skip_tensors("a=0>1", 2)
    block = partial(Broken, tensors=tensors, dtype=torch.float64)
    with pytest.raises(error, match=words):
        run_in_threads(2, 1, DoubleData(2), block=block, skip_tensors=tensors, pipeline_dtype=torch.float64)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"skip_tensors": "a=0>2"}, "config.skip_tensors: tensor a of stage 0: stage 2 uses it; only stages behind"),
        ({"skip_tensors": "a=0>1", "skip_cache": "some"}, "config.skip_cache is 'some'; it must be one of"),
        ({"skip_tensors": "a=0>1", "cuda_graph_impl": "transformer_engine"}, "does not go with cuda_graph_impl"),
        ({"skip_tensors": [SkipTensor("a", 0, (1,), dtype="int64")]}, "'int64'; it must be .* floating point"),
    ],
)
def test_settings_that_skip_tensors_exclude_are_refused_before_any_communication(fields, words):
    with pytest.raises(ScheduleInputError, match=words):
        run_in_threads(2, 1, ToyData(2), network=NothingMayPass(2), **fields)


def test_the_config_checks_them_when_it_is_made():
    with pytest.raises(ConfigError, match="skip_tensors: tensor a"):
        ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, skip_tensors="a=0>2")


class Unused(SkipBlock):
    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> object:
        return super().forward(x, **{name: tensor.detach() for name, tensor in named.items()})


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_tensor_that_gets_no_gradient(forward_only):
    """A rank that waits for the sum gets zeros."""
    tensors = skip_tensors("a=0>2", 3)
    block = partial(Unused, tensors=tensors)
    found = run_in_threads(3, 1, ToyData(2), block=block, skip_tensors=tensors, forward_only=forward_only)
    assert found.difference(reference_run(3, ToyData(2), forward_only, block)) == 0.0
