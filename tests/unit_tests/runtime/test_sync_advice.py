"""Replicas and tied embeddings that nothing synchronises are warned of, where that can be seen, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.config.settings import StepSettings
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.runtime.gradient_hooks import unsynchronised
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import ToyBlock, toy_config


class _Wrapper(torch.nn.Module):
    """As DistributedDataParallel holds what it wraps."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def no_sync(self) -> None: ...


def _hook(*given: Any) -> None: ...


def _stage() -> PipelineStage:
    return PipelineStage(ToyBlock(0), toy_config())


def _tied_by_parameter() -> PipelineStage:
    stage = _stage()
    stage.inner.linear.weight.shared_embedding = True
    return stage


def _tied_by_module() -> PipelineStage:
    stage = _stage()
    stage.inner.share_embeddings_and_output_weights = True
    return stage


def _sentences(
    chunk: torch.nn.Module, replicas: int = 1, pipeline_size: int = 2, kind: str = LOOP, **fields: Any
) -> list[str]:
    chunks = [chunk] if kind == LOOP else [chunk, _stage()]
    groups = SimpleNamespace(dp=ThreadGroup(0, replicas))
    settings = StepSettings.from_config(toy_config(**fields))
    placement = Placement(kind, pipeline_size, len(chunks))
    return list(unsynchronised(settings, chunks, placement, ThreadGroup(0, pipeline_size), groups))


def test_replicas_that_nothing_averages() -> None:
    [sentence] = _sentences(_stage(), replicas=4)
    assert "the 4 data-parallel replicas" in sentence
    assert "finalize_model_grads_func" in sentence


@pytest.mark.parametrize("tied", [_tied_by_parameter, _tied_by_module])
def test_tied_embeddings_that_nothing_sums(tied: Callable[[], PipelineStage]) -> None:
    [sentence] = _sentences(tied(), pipeline_size=3, grad_sync_func=_hook)
    assert "pipeline ranks 0 and 2 share" in sentence


def test_each_model_is_looked_at_once() -> None:
    stage = _stage()
    assert len(_sentences(stage, replicas=2)) == 1
    assert _sentences(stage, replicas=2) == []


def _wrapped_inside() -> PipelineStage:
    return PipelineStage(_Wrapper(ToyBlock(0)), toy_config())


@pytest.mark.parametrize(
    ("chunk", "case"),
    [
        (_stage, {}),
        (lambda: _Wrapper(_stage()), {"replicas": 2}),
        (_wrapped_inside, {"replicas": 2}),
        (_stage, {"replicas": 2, "grad_sync_func": _hook}),
        (_tied_by_module, {"replicas": 2, "finalize_model_grads_func": _hook}),
        (_tied_by_module, {"pipeline_size": 1}),
        (_tied_by_module, {"kind": V_SHAPE}),
    ],
    ids=["one_replica", "wrapped", "wrapped_inside", "grad_sync", "finalize", "one_rank", "both_ends_on_one_rank"],
)
def test_no_false_alarm(chunk: Callable[[], torch.nn.Module], case: dict[str, Any]) -> None:
    assert _sentences(chunk(), **case) == []
