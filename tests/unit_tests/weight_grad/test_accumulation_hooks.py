"""Hooks of parameters under split backwards: once, after the last W, with the whole gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pp.weight_grad import split_weight_grad
from tests.unit_tests.weight_grad.habits import VOCAB, Everything
from tests.unit_tests.weight_grad.steps import assert_same, count_hooks, gradients, new, step


@pytest.mark.parametrize("splits", [(True,) * 3, (False,) * 3, (True, False, True), (False, True, False)])
def test_accumulation_hooks_fire_once_after_the_last_w_with_the_whole_gradient(splits: tuple[bool, ...]) -> None:
    expected, model = new(Everything), new(Everything)
    step(expected, None)
    store, seen, fired = split_weight_grad(model), {}, count_hooks(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    step(model, store, splits)
    assert set(fired.values()) == {1}
    for name, grad in gradients(expected).items():
        torch.testing.assert_close(seen[name], grad, rtol=1e-6, atol=1e-7)


def test_an_optimizer_in_backward_takes_one_step() -> None:
    expected, model = new(Everything), new(Everything)
    store = split_weight_grad(model)
    step(expected, None)
    with torch.no_grad():
        for parameter in expected.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_sgd_in_backward)
    step(model, store)
    assert_same(dict(expected.state_dict()), dict(model.state_dict()))


def _sgd_in_backward(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


class _TwoPaths(nn.Module):
    """``second`` is used in the first microbatch only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor, mb: int) -> Tensor:
        return self.second(self.first(x)) if mb == 0 else self.first(x)


def test_a_layer_without_part_in_the_last_microbatch_still_fires_its_hooks() -> None:
    model = _TwoPaths()
    store = split_weight_grad(model)
    fired = count_hooks(model)
    with store.step({0: 1}):
        for mb in (0, 1):
            loss = model(torch.ones(2, 3), mb).sum()
            with store.backward(0, mb):
                loss.backward()
        store.run(0, 0)
        weights = dict(model.named_parameters())
        before = weights["second.weight"].grad.clone()
        store.run(0, 1)
    assert {n.split(".")[0]: c for n, c in fired.items()} == {"first": 1, "second": 1, "never": 0}
    assert torch.equal(model.second.weight.grad, before)
    assert model.never.weight.grad is None


def test_a_parameter_of_two_chunks_fires_after_the_last_of_both() -> None:
    first, last = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB, bias=False)
    last.weight = first.weight
    store = split_weight_grad([first, last])
    fired = count_hooks(first)
    with store.step({0: 0, 1: 0}):
        middle = first(Everything.batch(None, 0))
        leaf = middle.detach().requires_grad_()
        loss = last(leaf).pow(2).sum()
        with store.backward(1, 0):
            loss.backward()
        store.run(1, 0)
        assert fired == {"weight": 0}
        with store.backward(0, 0):
            middle.backward(leaf.grad)
        store.run(0, 0)
    assert fired == {"weight": 1}
    reference = nn.Embedding(VOCAB, 4)
    reference.load_state_dict(first.state_dict())
    F.linear(reference(Everything.batch(None, 0)), reference.weight).pow(2).sum().backward()
    torch.testing.assert_close(first.weight.grad, reference.weight.grad)
