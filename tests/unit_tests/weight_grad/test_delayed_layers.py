"""Layers that delay their weight gradients themselves, as Transformer Engine's do: driven through their own queue.

The stand-in has Transformer Engine's interface (``wgrad_store``, ``backward_dw()``) and its ways: backward returns no
weight gradient, the unfused path assigns ``.grad``. The real layers are tested where they can be imported.
"""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.errors import WeightGradSplitError
from megatron_pp.weight_grad import check_wrappers, split_weight_grad
from megatron_pp.weight_grad.transformer_engine import delays_weight_grad


class _Queue:
    def __init__(self, delay: bool) -> None:
        self.context: queue.Queue[Any] = queue.Queue()
        self._delay = delay

    def delay_wgrad_compute(self) -> bool:
        return self._delay


class _DelayedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: DelayedLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.layer.wgrad_store.context.put((weight, x, grad))
        return grad @ weight, None, None


class DelayedLinear(nn.Module):
    """Two matrices when ``deep``, both worked off by one ``backward_dw()``, as LayerNormMLP's are."""

    def __init__(self, width: int, delay: bool = True, deep: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.second = nn.Parameter(torch.randn(width, width)) if deep else None
        self.wgrad_store = _Queue(delay)
        self.wgrad_accumulation_and_reduce_hooks: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.wgrad_store.delay_wgrad_compute():
            return x @ self.weight.t()
        x = _DelayedMatmul.apply(x, self._own("weight"), self)
        return x if self.second is None else _DelayedMatmul.apply(torch.tanh(x), self._own("second"), self)

    def _own(self, name: str) -> Tensor:
        return self._parameters[name]  # type: ignore[return-value]

    def backward_dw(self) -> None:
        for _ in range(1 if self.second is None else 2):
            weight, x, grad = self.wgrad_store.context.get()
            new = grad.t() @ x
            if getattr(weight, "main_grad", None) is not None:
                weight.main_grad += new
            else:
                weight.grad = new
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class _Eager(DelayedLinear):
    """The same layer as autograd would run it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight.t()
        return x if self.second is None else torch.tanh(x) @ self.second.t()


def new_models(deep: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(4, 4), _Eager(4, deep=deep), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), DelayedLinear(4, deep=deep), nn.Linear(4, 4))
    model.load_state_dict(expected.state_dict())
    return expected, model


def batch(mb: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(mb))


def step(model: nn.Module, store: Any, splits: list[bool]) -> None:
    with store.step({0: len(splits) - 1}):
        losses = [model(batch(mb)).pow(2).sum() for mb in range(len(splits))]
        waiting = []
        for mb, loss in enumerate(losses):
            with store.backward(0, mb, split=splits[mb]):
                loss.backward()
            if splits[mb]:
                waiting.append(mb)
            elif waiting:
                raise AssertionError("whole backwards come before split ones in these tests")
        for mb in waiting:
            store.run(0, mb)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("splits", [[True] * 3, [False] * 3, [False, True, True]])
def test_gradients_add_up_over_microbatches(deep: bool, splits: list[bool]) -> None:
    expected, model = new_models(deep)
    for mb in range(3):
        expected(batch(mb)).pow(2).sum().backward()
    store = split_weight_grad(model)
    step(model, store, splits)
    for (name, one), (_, other) in zip(expected.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    assert store.report.delayed == 1


def test_a_second_step_adds_to_what_is_there() -> None:
    expected, model = new_models()
    store = split_weight_grad(model)
    for _ in range(2):
        for mb in range(3):
            expected(batch(mb)).pow(2).sum().backward()
        step(model, store, [True] * 3)
    torch.testing.assert_close(model[1].weight.grad, expected[1].weight.grad)


def test_fused_accumulation_is_the_layers_own() -> None:
    expected, model = new_models()
    model[1].weight.main_grad = torch.zeros(4, 4)
    for mb in range(3):
        expected(batch(mb)).pow(2).sum().backward()
    step(model, split_weight_grad(model), [True] * 3)
    torch.testing.assert_close(model[1].weight.main_grad, expected[1].weight.grad)
    assert model[1].weight.grad is None


def test_hooks_of_the_layer_are_its_own_business_and_others_fire_once() -> None:
    _, model = new_models()
    fired: list[str] = []
    model[1].wgrad_accumulation_and_reduce_hooks.append(lambda: fired.append("layer"))
    step(model, split_weight_grad(model), [True] * 3)
    assert fired == ["layer"] * 3


def test_a_layer_built_without_delay_is_whole() -> None:
    model = nn.Sequential(DelayedLinear(4, delay=False))
    assert not delays_weight_grad(model[0])
    report = split_weight_grad(model).report
    assert (report.split, report.delayed, report.whole) == (0, 0, 1)


def test_megatrons_empty_backward_dw_is_no_delay() -> None:
    assert not delays_weight_grad(SimpleNamespace(backward_dw=lambda: None))  # type: ignore[arg-type]


def test_a_queue_that_does_not_move_is_an_error() -> None:
    _, model = new_models()
    model[1].backward_dw = lambda: None
    with pytest.raises(RuntimeError, match="left its queue as it was"):
        step(model, split_weight_grad(model), [True])


def test_torchs_distributed_data_parallel_is_refused_around_such_layers() -> None:
    _, model = new_models()
    store = split_weight_grad(model)
    wrapped = object.__new__(DistributedDataParallel)
    check_wrappers(store, [model])
    with pytest.raises(WeightGradSplitError, match="1 layers with delay_wgrad_compute"):
        check_wrappers(store, [wrapped])


@pytest.mark.gpu
def test_transformer_engines_own_layers() -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    torch.manual_seed(0)
    expected = nn.Sequential(te.Linear(32, 64), te.LayerNormMLP(64, 128), te.Linear(64, 32)).cuda()
    model = nn.Sequential(
        te.Linear(32, 64, delay_wgrad_compute=True),
        te.LayerNormMLP(64, 128, delay_wgrad_compute=True),
        te.Linear(64, 32, delay_wgrad_compute=True),
    ).cuda()
    model.load_state_dict(expected.state_dict())
    store = split_weight_grad(model)
    assert store.report.delayed == 3
    inputs = [torch.randn(16, 32, device="cuda") for _ in range(3)]
    for x in inputs:
        expected(x).pow(2).sum().backward()
    with store.step({0: 2}):
        losses = [model(x).pow(2).sum() for x in inputs]
        for mb, loss in enumerate(losses):
            with store.backward(0, mb):
                loss.backward()
        for mb in range(3):
            store.run(0, mb)
    for (name, one), (_, other) in zip(expected.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name)
