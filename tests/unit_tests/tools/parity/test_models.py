"""`compare` for a user's model under schedules of this engine, with ranks as processes."""

from __future__ import annotations

import pytest
import torch

import megatron_pp
from megatron_pp.errors import ScheduleInputError
from megatron_pp.parity import Pipeline, assert_equal, assert_within_rounding, compare
from megatron_pp.tools.parity.workers.processes import RunError


class Block(torch.nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.linear, self.factor = torch.nn.Linear(6, 6), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.factor + x


class WrongBackward(torch.autograd.Function):
    """The identity. Its gradient is doubled if a pipeline runs it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (2 if torch.distributed.is_initialized() else 1)


class Faulty(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WrongBackward.apply(super().forward(x))


def microbatches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, 6, generator=generator) for _ in range(2)) for _ in range(count)]


def model(*, faulty: bool = False) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(Faulty() if faulty and k == 1 else Block() for k in range(4)))


@pytest.mark.parametrize("layout", [Pipeline(2), Pipeline(2, 2, pipeline_schedule="zb_v")], ids=["1f1b", "zb_v"])
def test_a_right_model_is_equal_to_the_bit(layout):
    found = compare(model, microbatches(), layout, None)
    assert_equal(found)
    assert len(found.differences) == 4 + 8


def test_a_wrong_gradient_is_named_with_its_ratio_and_the_assertions_fail():
    found = compare(lambda: model(faulty=True), microbatches(), Pipeline(2), Pipeline(1))
    assert found.first.key.name == "0.linear.weight"
    assert found.first.ratio == pytest.approx(2)
    assert {one.key.name for one in found.wrong()} == {f"{k}.linear.{of}" for k in (0, 1) for of in ("weight", "bias")}
    for check in (assert_equal, assert_within_rounding):
        with pytest.raises(AssertionError, match=r"different\ngradient of 0.linear.weight: off by"):
            check(found)


def test_two_layouts_are_compared():
    assert_equal(compare(model, microbatches(), Pipeline(2), Pipeline(2, 2, pipeline_schedule="interleaved_1f1b")))


def test_a_model_that_cannot_run_raises_an_error():
    with pytest.raises(ScheduleInputError, match="4 layers cannot be divided into 8 stages"):
        compare(model, microbatches(), Pipeline(4, 2))
    with pytest.raises(RunError, match=r"(?s)rank \d failed:.*no_such_schedule"):
        compare(model, microbatches(), Pipeline(2, pipeline_schedule="no_such_schedule"))


def test_chunks_in_a_wrong_order_are_found(monkeypatch):
    """The fault is in the function that says which stages a rank has. Numbers of a wrong model are not accepted."""
    right = megatron_pp.stage_numbers

    def swapped(*of):
        return tuple(stages[::-1] for stages in right(*of))

    monkeypatch.setattr(megatron_pp, "stage_numbers", swapped)
    with pytest.raises(RunError, match=r"(?s)rank \d failed:.*chunk 0 on rank \d is stage \d under zb_v"):
        compare(model, microbatches(), Pipeline(2, 2, pipeline_schedule="zb_v"))
