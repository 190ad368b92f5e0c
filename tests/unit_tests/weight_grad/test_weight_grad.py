"""Backward in two halves: the same gradients to the last bit, hooks once, nothing changed outside of a step."""

from __future__ import annotations

import abc
import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_pp.errors import WeightGradError, WeightGradSplitError
from megatron_pp.weight_grad import WeightGradStore, split_weight_grad, store_of, unsplit_weight_grad

VOCAB, WIDTH, MICROBATCHES = 11, 8, 4


class _Square(torch.autograd.Function):
    """A custom autograd function with a parameter of its own: x * w^2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w * w, (2 * grad * x * w).sum((0, 1))


class _Custom(abc.ABC, nn.Module):  # an abstract base: its class has another layout
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(x, self.weight)


class Net(nn.Module):
    """Tied embedding and head, norms, attention that uses its child's weight, a convolution, a custom function, a bare
    parameter, a frozen layer, a layer used twice, and one with a parametrized weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.custom = _Custom()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.bias_only = nn.Linear(WIDTH, WIDTH)
        self.bias_only.weight.requires_grad_(False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.norm(self.up(x)))) * self.scale
        x = x + self.attention(x, x, x)[0]
        x = x + self.convolution(x.permute(1, 2, 0)).permute(2, 0, 1)
        x = self.bias_only(self.frozen(self.custom(x)))
        x = x + self.twice(torch.tanh(self.twice(x)))
        return self.head(self.normed(x))


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(mb: int) -> Tensor:
    return torch.randint(0, VOCAB, (5, 2), generator=torch.Generator().manual_seed(mb))


def loss_of(model: nn.Module, mb: int) -> Tensor:
    return model(tokens(mb)).pow(2).mean()


def plain_step(model: nn.Module, microbatches: int = MICROBATCHES) -> None:
    for mb in range(microbatches):
        loss_of(model, mb).backward()


def split_step(
    model: nn.Module,
    store: WeightGradStore,
    split: Callable[[int], bool] = lambda mb: True,
    delay: int = 1,
    microbatches: int = MICROBATCHES,
) -> None:
    """All forwards, then backwards with each W ``delay`` backwards late, but before the next whole backward."""
    with store.step({0: microbatches - 1}):
        losses = [loss_of(model, mb) for mb in range(microbatches)]
        waiting: list[int] = []
        for mb in range(microbatches):
            while waiting and (len(waiting) > delay or not split(mb)):
                store.run(0, waiting.pop(0))
            with store.backward(0, mb, split=split(mb)):
                losses[mb].backward()
            if split(mb):
                waiting.append(mb)
        for mb in waiting:
            store.run(0, mb)


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


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_split_gradients_are_those_of_autograd_to_the_last_bit(delay: int) -> None:
    expected, model = new_net(), new_net()
    plain_step(expected)
    split_step(model, split_weight_grad(model), delay=delay)
    assert_same(gradients(expected), gradients(model))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(splits=st.lists(st.booleans(), min_size=1, max_size=6), delay=st.integers(0, 3))
def test_any_mixture_of_whole_and_split_backwards(splits: list[bool], delay: int) -> None:
    expected, model = new_net().double(), new_net().double()
    plain_step(expected, len(splits))
    split_step(model, split_weight_grad(model), splits.__getitem__, delay, len(splits))
    # Layers used twice in a whole backward are added one by one, where autograd adds their gradients first: equal but
    # for rounding, which in float64 is far from what a gradient more or less would make.
    for name, grad in gradients(expected).items():
        torch.testing.assert_close(gradients(model)[name], grad, rtol=1e-6, atol=1e-8)
    once = {n: g for n, g in gradients(expected).items() if not n.startswith("twice")}
    assert_same(once, {n: g for n, g in gradients(model).items() if not n.startswith("twice")})


def test_two_steps_without_zero_grad_give_twice_the_gradient() -> None:
    expected, model = new_net(), new_net()
    store = split_weight_grad(model)
    for _ in range(2):
        plain_step(expected)
        split_step(model, store)
    assert_same(gradients(expected), gradients(model))


def test_outside_of_a_step_nothing_is_different() -> None:
    expected, model = new_net(), new_net()
    split_weight_grad(model)
    fired = count_hooks(model)
    plain_step(expected)
    plain_step(model)
    assert_same(gradients(expected), gradients(model))
    assert set(fired.values()) == {MICROBATCHES}
    assert isinstance(model.up, nn.Linear)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert model.head.weight is model.embedding.weight
    model.load_state_dict(expected.state_dict())


def test_evaluation_touches_no_gradient() -> None:
    model = new_net()
    store = split_weight_grad(model)
    with torch.no_grad(), store.step({0: 0}):
        assert not loss_of(model, 0).requires_grad
    assert gradients(model) == {}


@pytest.mark.parametrize("device_dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(device_dtype: torch.dtype) -> None:
    expected, model = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(2))
    model.load_state_dict(expected.state_dict())
    store = split_weight_grad(model)
    inputs = [torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(mb)) for mb in range(3)]
    with torch.autocast("cpu", dtype=device_dtype):
        for x in inputs:
            expected(x).float().sum().backward()
    with store.step({0: 2}):
        for mb, x in enumerate(inputs):
            with torch.autocast("cpu", dtype=device_dtype):
                loss = model(x).float().sum()
            with store.backward(0, mb):
                loss.backward()
            store.run(0, mb)
    assert_same(gradients(expected), gradients(model))
    assert model[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 2, 3, 8)])
def test_inputs_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    expected = nn.Linear(8, 4)
    model = copy.deepcopy(expected)
    store = split_weight_grad(model)
    x = torch.randn(shape)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected(theirs).pow(2).sum().backward()
    with store.step({0: 0}):
        loss = model(ours).pow(2).sum()
        with store.backward(0, 0):
            loss.backward()
        store.run(0, 0)
    assert torch.equal(ours.grad, theirs.grad)
    assert_same(gradients(expected), gradients(model))


# -- the order of things ----------------------------------------------------------------------------------------------


def test_b_leaves_weight_gradients_for_w_in_the_order_of_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    store = split_weight_grad(model)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: order.append(name))
    x = torch.randn(2, 4, requires_grad=True)
    with store.step({0: 1}):
        losses = [model(x).sum() for _ in range(2)]
        for mb in (0, 1):
            with store.backward(0, mb):
                losses[mb].backward()
        assert order == []
        assert gradients(model) == {}
        assert x.grad is not None
        store.run(0, 0)
        assert order == ["2.weight", "2.bias", "0.weight", "0.bias"]
        first = {name: grad.clone() for name, grad in gradients(model).items()}
        store.run(0, 1)
    assert_same({name: 2 * grad for name, grad in first.items()}, gradients(model))


def test_a_w_before_its_b_or_twice_is_an_error() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    with pytest.raises(WeightGradError, match="chunk 0, microbatch 3 wait"), store.step({0: 3}):
        store.run(0, 3)
    with store.step({0: 0}):
        with store.backward(0, 0):
            pass
        with pytest.raises(WeightGradError, match="ran twice"), store.backward(0, 0):
            pass
        store.run(0, 0)


def test_a_b_without_its_w_is_an_error_at_the_end_of_the_step() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    store.begin_step({0: 0})
    loss = model(torch.ones(1, 2)).sum()
    with store.backward(0, 0):
        loss.backward()
    with pytest.raises(WeightGradError, match=r"\[\(0, 0\)\] were left behind"):
        store.end_step()
    plain = model(torch.ones(1, 2)).sum()
    plain.backward()  # the store is out of the way again
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_backward_outside_of_the_store_is_an_error() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    with pytest.raises(WeightGradError, match=r"outside of store\.backward"), store.step({0: 0}):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(WeightGradError, match="call begin_step first"), store.backward(0, 0):
        pass


def test_a_failed_step_leaves_nothing_behind() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    with pytest.raises(ZeroDivisionError), store.step({0: 1}):
        _fail_after_a_backward(model, store)
    assert not store.armed
    with store.step({0: 0}):
        loss = model(torch.ones(1, 2)).sum()
        with store.backward(0, 0):
            loss.backward()
        store.run(0, 0)
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def _fail_after_a_backward(model: nn.Module, store: WeightGradStore) -> None:
    loss = model(torch.ones(1, 2)).sum()
    with store.backward(0, 0):
        loss.backward()
    raise ZeroDivisionError


# -- hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [(True,) * 4, (False,) * 4, (True, False, True, False), (False, True, False, True)])
def test_accumulation_hooks_fire_once_after_the_last_w_with_the_whole_gradient(splits: tuple[bool, ...]) -> None:
    expected, model = new_net(), new_net()
    plain_step(expected)
    store = split_weight_grad(model)
    seen: dict[str, Tensor] = {}
    fired = count_hooks(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    split_step(model, store, splits.__getitem__)
    assert set(fired.values()) == {1}
    for name, grad in gradients(expected).items():
        torch.testing.assert_close(seen[name], grad, rtol=1e-6, atol=1e-8)


def test_an_optimizer_in_backward_takes_one_step() -> None:
    expected, model = new_net(), new_net()
    store = split_weight_grad(model)
    plain_step(expected)
    with torch.no_grad():
        for parameter in expected.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_sgd_in_backward)
    split_step(model, store)
    assert_same(dict(expected.state_dict()), dict(model.state_dict()))


def _sgd_in_backward(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


def test_tensor_hooks_change_every_gradient() -> None:
    expected, model = new_net(), new_net()
    for net in (expected, model):
        net.up.weight.register_hook(lambda grad: 3 * grad)
        net.norm.weight.register_hook(lambda grad: -grad)
    plain_step(expected)
    split_step(model, split_weight_grad(model))
    assert_same(gradients(expected), gradients(model))


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
        middle = first(tokens(0))
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
    F.linear(reference(tokens(0)), reference.weight).pow(2).sum().backward()
    torch.testing.assert_close(first.weight.grad, reference.weight.grad)


# -- memory -----------------------------------------------------------------------------------------------------------


class _Box:
    """What autograd holds instead of a saved tensor: alive as long as the graph wants it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @staticmethod
    def unpack(box: _Box) -> Tensor:
        return box.tensor


def test_between_b_and_w_only_inputs_and_output_gradients_of_linear_layers_are_kept() -> None:
    rows, wide = 64, 32
    model = nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Softmax(-1), nn.LayerNorm(wide), nn.Linear(wide, wide))
    store = split_weight_grad(model)
    x = torch.randn(rows, wide, requires_grad=True)
    boxes: weakref.WeakSet[_Box] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Box:
        box = _Box(tensor)
        boxes.add(box)
        return box

    with store.step({0: 1}):
        with torch.autograd.graph.saved_tensors_hooks(pack, _Box.unpack):
            loss = (model(x) * torch.randn(rows, wide)).sum()
        assert len(boxes) > 6
        with store.backward(0, 0):
            loss.backward()
        del loss
        assert len(boxes) == 0  # the graph kept nothing
        assert store.kept_bytes(0, 0) == 4 * 4 * rows * wide  # two inputs, two output gradients
        store.run(0, 0)
        assert store.kept_bytes(0, 0) == 0
        with store.backward(0, 1, split=False):
            pass


# -- activation checkpointing -----------------------------------------------------------------------------------------


class _Counting(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
        self.forwards = 0

    def _run(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self._run(x)
        return torch.utils.checkpoint.checkpoint(self._run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_checkpointed_layers_run_forward_twice_per_microbatch_and_not_again_in_w(reentrant: bool, split: bool) -> None:
    torch.manual_seed(1)
    expected = nn.Sequential(_Counting(None), _Counting(None))
    model = nn.Sequential(_Counting(reentrant), _Counting(reentrant))
    model.load_state_dict(expected.state_dict())
    store = split_weight_grad(model)
    inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
    for x in inputs:
        expected(x).pow(2).sum().backward()
    with store.step({0: 2}):
        losses = [model(x).pow(2).sum() for x in inputs]
        for mb, loss in enumerate(losses):
            with store.backward(0, mb, split=split):
                loss.backward()
        if split:
            for mb in range(3):
                store.run(0, mb)
    assert [part.forwards for part in model] == [6, 6]
    assert_same(gradients(expected), gradients(model))


# -- conversion -------------------------------------------------------------------------------------------------------


def test_what_becomes_of_each_layer_is_reported() -> None:
    report = split_weight_grad(new_net()).report
    # embedding, up, down, out_proj, frozen, bias_only, twice, head
    assert (report.split, report.delayed) == (8, 0)
    assert "8 layers defer their weight gradients" in str(report)


def test_converting_twice_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    split_weight_grad(model)
    with pytest.raises(WeightGradSplitError, match="0 was converted before"):
        split_weight_grad(model)


def test_torchscript_is_refused() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(WeightGradSplitError, match="0 is TorchScript"):
        split_weight_grad(model)


def test_undoing_the_conversion() -> None:
    model = new_net()
    classes = [type(layer) for layer in model.modules()]
    split_weight_grad(model)
    assert [type(layer) for layer in model.modules()] != classes
    unsplit_weight_grad(model)
    assert [type(layer) for layer in model.modules()] == classes
    assert store_of([model]) is None


def test_copies_and_pickles_are_not_converted() -> None:
    model = new_net()
    store = split_weight_grad(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(_plain()))):
        assert store_of([again]) is None
        assert type(again.up if isinstance(again, Net) else again[0]) is nn.Linear
    assert store_of([model]) is store
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


def _plain() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    split_weight_grad(model)
    return model


def test_a_layer_of_two_chunks_is_converted_once() -> None:
    shared = nn.Linear(2, 2)
    store = split_weight_grad([nn.Sequential(shared), nn.Sequential(shared, nn.Linear(2, 2))])
    assert store.report.split == 2


def test_chunks_must_share_one_store() -> None:
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert store_of(chunks) is None
    split_weight_grad(chunks[0])
    with pytest.raises(WeightGradSplitError, match="call split_weight_grad once"):
        store_of(chunks)


def test_a_parameter_that_is_replaced_is_found() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    del model.bias
    model.register_parameter("bias", None)
    with store.step({0: 0}):
        loss = model(torch.ones(1, 2)).sum()
        with store.backward(0, 0):
            loss.backward()
        store.run(0, 0)
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
