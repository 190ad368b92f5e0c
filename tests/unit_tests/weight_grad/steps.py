"""Steps of small models, with weight gradients apart, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pp.weight_grad import WeightGradStore
from tests.unit_tests.weight_grad.habits import MICROBATCHES, Habit

Run = tuple[list[Tensor], list[Tensor | None], dict[str, Tensor | None], dict[str, Tensor], list[tuple[str, Tensor]]]
Regions = Callable[[], Any]


def new(kind: type[Habit]) -> Habit:
    torch.manual_seed(7)
    return kind()


def note_hooks(model: nn.Module, calls: list[tuple[str, Tensor]]) -> None:
    """Tensor hooks which change the gradient, not in a linear way, and note it."""

    def noted(name: str, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        calls.append((name, grad.clone()))
        return grad if grad.is_sparse or grad.is_complex() else grad + grad.pow(2)

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad, name=name: noted(name, grad))


def step(
    model: Habit,
    store: WeightGradStore | None,
    splits: Sequence[bool] = (True,) * MICROBATCHES,
    region: Regions = nullcontext,
    hooks: bool = False,
) -> Run:
    """Two forwards ahead of the backwards, as on a middle stage of 1F1B; each W right after the next forward."""
    calls: list[tuple[str, Tensor]] = []
    if hooks:
        note_hooks(model, calls)
    inputs, losses, outputs = [], [], []
    waiting: list[int] = []
    with nullcontext() if store is None else store.step({0: MICROBATCHES - 1}):
        for slot in range(MICROBATCHES + 1):
            if slot < MICROBATCHES:
                x = model.batch(slot).requires_grad_(model.inputs_need_gradients)
                with region():
                    y = model(x)
                inputs.append(x)
                outputs.append(y.detach().clone())
                losses.append((y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum())
            while store is not None and waiting:
                store.run(0, waiting.pop())
            if slot:
                _backward(losses[slot - 1], slot - 1, store, splits[slot - 1], waiting)
        while store is not None and waiting:
            store.run(0, waiting.pop())
    grads = {name: p.grad for name, p in model.named_parameters()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return outputs, [x.grad for x in inputs], grads, weights, calls


def _backward(loss: Tensor, mb: int, store: WeightGradStore | None, split: bool, waiting: list[int]) -> None:
    if store is None:
        loss.backward()
        return
    with store.backward(0, mb, split=split):
        loss.backward()
    if split:
        waiting.append(mb)


def run_split(
    store: WeightGradStore,
    loss_of: Callable[[int], Tensor],
    microbatches: int = 1,
    w_order: Sequence[int] | None = None,
    split: bool = True,
) -> None:
    """A step of one chunk: all forwards, all backwards, then W in ``w_order``."""
    order = range(microbatches) if w_order is None else w_order
    with store.step({0: order[-1] if split else microbatches - 1}):
        losses = [loss_of(mb) for mb in range(microbatches)]
        for mb, loss in enumerate(losses):
            with store.backward(0, mb, split=split):
                loss.backward()
        for mb in order if split else ():
            store.run(0, mb)


def step_on_ones(model: nn.Linear, store: WeightGradStore) -> None:
    run_split(store, lambda mb: model(torch.ones(1, model.in_features)).sum())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def count_hooks(model: nn.Module) -> dict[str, int]:
    fired: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            fired[name] = 0
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.update({name: fired[name] + 1}))
    return fired


def with_main_grads(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Give parameters a ``main_grad`` as Megatron's DistributedDataParallel does."""
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype)
        parameter.grad_added_to_main_grad = False
    return model
