"""Habits of models, converted and not, under one order of forwards, backwards and weight gradients: outputs, input
gradients, weight gradients, weights and the calls of tensor hooks are equal to the last bit, and so are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from megatron_pp.errors import WeightGradError
from megatron_pp.weight_grad import split_weight_grad
from tests.unit_tests.weight_grad.habits import HABITS, Complex, Forces, FunctionalCallAlone, Habit, Vmap
from tests.unit_tests.weight_grad.steps import Regions, Run, new, step


def same_bits(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_sparse:
        return other.is_sparse and same_bits(one.coalesce().to_dense(), other.coalesce().to_dense())
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


def close(one: Tensor | None, other: Tensor | None, within: float = 1e-5) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=within, atol=within)


def close_for_autocast(one: Tensor | None, other: Tensor | None) -> bool:
    return close(one, other, within=0.05)


def differences(expected: Run, got: Run, same: Callable[[Any, Any], bool] = same_bits) -> list[str]:
    found = [f"output {k}" for k, (a, b) in enumerate(zip(expected[0], got[0], strict=True)) if not same(a, b)]
    found += [f"input {k}" for k, (a, b) in enumerate(zip(expected[1], got[1], strict=True)) if not same(a, b)]
    found += [f"gradient of {name}" for name, a in expected[2].items() if not same(a, got[2][name])]
    found += [f"weight {name}" for name, a in expected[3].items() if not same(a, got[3][name])]
    for name in expected[3]:
        seen, wanted = ([grad for n, grad in run[4] if n == name] for run in (got, expected))
        if len(seen) != len(wanted) or not all(map(same, seen, wanted)):
            found.append(f"hooks of {name}: {len(seen)} calls for {len(wanted)}")
    return found


def outcome(kind: type[Habit], convert: bool, splits: list[bool], region: Regions, hooks: bool) -> Run | str:
    model = new(kind)
    try:
        return step(model, split_weight_grad(model) if convert else None, splits, region, hooks)
    except WeightGradError:
        raise
    except RuntimeError as error:
        return str(error).split(";")[0].split("[")[0]


def compare(kind: type[Habit], splits: list[bool], region: Regions = nullcontext) -> list[str]:
    hooks = kind.hooked and (kind.exact_under_autocast or region is nullcontext)
    expected, got = (outcome(kind, convert, splits, region, hooks) for convert in (False, True))
    if isinstance(expected, str) or isinstance(got, str):
        return [] if expected == got else [f"expected {expected}, got {got}"]
    if region is not nullcontext and not (kind.exact and kind.exact_under_autocast):
        return differences(expected, got, close_for_autocast)
    return differences(expected, got, same_bits if kind.exact else close)


@pytest.mark.parametrize("kind", HABITS, ids=lambda kind: kind.__name__)
def test_a_converted_model_computes_the_same(kind: type[Habit]) -> None:
    for splits in ([True] * 3, [False] * 3, [False, True, False]):
        assert compare(kind, splits) == [], splits


def autocast(dtype: torch.dtype = torch.bfloat16, cache: bool = True) -> Any:
    return torch.autocast("cpu", dtype=dtype, cache_enabled=cache)


class ThreeOfOneInput(Habit):
    """Three layers of one input, like queries, keys and values. The input is a leaf, which autocast casts once."""

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.two(x) + self.one(x)


class RegionWithout(Habit):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.one(x)
        return self.one(x)


UNDER_AUTOCAST = [*HABITS, ThreeOfOneInput, RegionWithout]
REGIONS: dict[str, Regions] = {
    "bf16": autocast,
    "fp16": lambda: autocast(torch.float16),
    "no cache": lambda: autocast(cache=False),
}


@pytest.mark.parametrize("kind", UNDER_AUTOCAST, ids=lambda kind: kind.__name__)
def test_a_converted_model_computes_the_same_under_autocast(kind: type[Habit]) -> None:
    for name, region in REGIONS.items():
        assert compare(kind, [True, False, True], region) == [], name


# -- what is logged, and what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Forces, "its gradient is differentiated again"),
        (FunctionalCallAlone, "its weight is not the one that the model had when the step began"),
        (Vmap, "it is called within vmap or another transform of torch.func"),
        (Complex, "its tensors are complex, sparse or nested"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_layer_that_stays_whole_is_named_once(
    kind: type[Habit], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = new(kind)
    step(model, split_weight_grad(model))
    said = [record.getMessage() for record in caplog.records]
    line = f"layer one computes its weight gradient in B, not in W: {reason} ("
    assert sum(text.startswith(line) and "% of the weight gradients' FLOPs)" in text for text in said) == 1


def test_an_ordinary_model_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = new(Habit)
    step(model, split_weight_grad(model))
    assert caplog.records == []


def test_an_input_changed_between_b_and_w_is_an_error_that_names_the_layer() -> None:
    model = new(Habit)
    store = split_weight_grad(model)
    x = model.batch(0)
    store.begin_step({0: 0})
    loss = model(x).sum()
    with store.backward(0, 0):
        loss.backward()
    x.mul_(2)
    with pytest.raises(WeightGradError, match="input of layer one, or the gradient"):
        store.run(0, 0)


def test_a_hook_that_fires_without_a_gradient_calls_no_tensor_hook() -> None:
    model = new(Habit)
    store, calls, fired = split_weight_grad(model), [], []
    model.two.weight.register_hook(lambda grad: calls.append(grad) or grad + 1)
    model.two.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    with store.step({0: 1}):
        for mb, part in enumerate((model, model.one)):  # the last microbatch does not use it
            loss = part(model.batch(mb)).sum()
            with store.backward(0, mb):
                loss.backward()
            store.run(0, mb)
    assert len(calls) == 1
    assert len(fired) == 1
    assert torch.equal(fired[0], calls[0] + 1)


def _parametrized(model: Habit) -> None:
    nn.utils.parametrizations.spectral_norm(model.one)
    nn.utils.parametrizations.weight_norm(model.two)


def _normed_by_hooks(model: Habit) -> None:
    nn.utils.weight_norm(model.one)
    nn.utils.spectral_norm(model.two)


class _OfOwnClass(nn.Parameter):
    pass


def _of_own_classes(model: Habit) -> None:
    model.one.weight = _OfOwnClass(model.one.weight.data)
    weight = model.norm.weight.data
    model.norm.weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("change", [_parametrized, _normed_by_hooks, _of_own_classes])
def test_parameters_that_are_changed_before_or_after_the_conversion(
    change: Callable[[Habit], None], first: bool
) -> None:
    runs = []
    for converted in (False, True):
        model, store = new(Habit), None
        if converted and not first:
            store = split_weight_grad(model)
        change(model)
        if converted and first:
            store = split_weight_grad(model)
        runs.append([step(model, store) for _ in range(2)][-1])
    assert differences(*runs) == []
