"""Stages that give each other lists of tensors: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.toy import (
    HIDDEN,
    ToyBlock,
    ToyData,
    ToyResult,
    gradients_of,
    toy_config,
    toy_loss,
)
from tests.harness.step_runs import every_policy, in_pipeline, result_of

SHAPES = [(3, 2, HIDDEN), (5, 2, HIDDEN)]


class TwoStreams(torch.nn.Module):
    """Takes and gives two tensors of different shapes; ``kind`` says what it makes of the second one."""

    def __init__(self, stage: int, last: bool, kind: str) -> None:
        super().__init__()
        self.one, self.two = ToyBlock(2 * stage), ToyBlock(2 * stage + 1)
        self.last = last
        self.kind = kind

    def forward(self, pair: Any) -> Any:
        a, b = pair
        if self.kind == "tied":
            a = a + b.mean()
        a, b = self.one(a), self.two(b)
        if self.kind == "second without gradient":
            b = b.detach()
        if self.kind == "views":
            a, b = a.view(a.shape), torch.cat([b, b])[:5]
        return a + b.sum() if self.last else [a, b]


class Pairs(ToyData):
    """Inputs of two tensors."""

    def iterator(self) -> Any:
        generator = torch.Generator().manual_seed(11)
        for mb in range(self.num_microbatches):
            first = torch.randn(SHAPES[0], generator=generator), torch.randn(SHAPES[1], generator=generator)
            yield first, self.microbatch(mb)[1]


def two_streams_step(data_iterator: Any, model: Any) -> Any:
    first, target = next(data_iterator)
    return model(first), lambda output: toy_loss(target, output)


def two_streams(size: int, kind: str, count: int, forward_only: bool = False, **fields: Any) -> ToyResult:
    """One step of ``size`` ranks that exchange lists of two tensors."""

    def adjust(receive: list[Any], send: list[Any]) -> tuple[list[Any], list[Any]]:
        assert receive == send == [SHAPES[0]]
        return list(SHAPES), list(SHAPES)

    return result_of(
        *in_pipeline(
            *(size, two_streams_step),
            block=lambda stage: TwoStreams(stage, stage == size - 1, kind),
            data=Pairs(count),
            more={"forward_only": forward_only, "adjust_tensor_shapes_fn": adjust},
            **fields,
        )
    )


def two_streams_alone(size: int, kind: str, count: int, forward_only: bool = False) -> ToyResult:
    modules = [TwoStreams(stage, stage == size - 1, kind) for stage in range(size)]
    result = ToyResult()
    with torch.set_grad_enabled(not forward_only):
        for x, target in Pairs(count).iterator():
            for module in modules:
                x = module(x)
            loss, report = toy_loss(target, x)
            result.losses.append(float(report["loss"]))
            if not forward_only:
                (loss / count).backward()
    result.grads = gradients_of(dict(enumerate(modules)))
    return result


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
@every_policy
@pytest.mark.parametrize("kind", ["apart", "tied", "views"])
@pytest.mark.parametrize("size", [2, 4])
def test_lists_of_outputs(size: int, kind: str, policy: dict[str, Any], variable: bool) -> None:
    for forward_only in (False, True):
        expected = two_streams_alone(size, kind, 5, forward_only)
        result = two_streams(size, kind, 5, forward_only, variable_seq_lengths=variable, **policy)
        assert result.difference(expected) == 0.0


@every_policy
def test_a_list_in_which_one_tensor_needs_no_gradient(policy: dict[str, Any]) -> None:
    """The gradient that comes back for it has nowhere to go; parameters behind it have none, as in one process."""
    expected = two_streams_alone(3, "second without gradient", 5)
    result = two_streams(3, "second without gradient", 5, **policy)
    assert result.losses == expected.losses
    for name, grad in expected.grads.items():
        assert torch.equal(result.grads[name], grad), name
    assert result.grads.keys() == expected.grads.keys()


def test_without_a_pipeline_shapes_are_not_adjusted() -> None:
    """adjust_tensor_shapes_fn is asked for pipelines without chunks, as in Megatron."""
    with pytest.raises(ValueError, match="adjust_tensor_shapes_fn is for pipelines with one model chunk a rank"):
        get_forward_backward_func(1)(
            forward_step_func=two_streams_step,
            data_iterator=Pairs(1).iterator(),
            model=PipelineStage(TwoStreams(0, True, "apart"), toy_config()),
            num_microbatches=1,
            adjust_tensor_shapes_fn=lambda receive, send: (receive, send),
        )
