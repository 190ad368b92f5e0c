"""Backward in two halves: the same gradients to the last bit, hooks once, nothing changed outside of a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from megatron_pp.errors import WeightGradError
from megatron_pp.weight_grad import WeightGradStore, linear, split_weight_grad
from megatron_pp.weight_grad.linear import DeferredLinear
from megatron_pp.weight_grad.parameter_leaf import add_hooked
from testkit.stand_ins.timers import Timers
from tests.unit_tests.weight_grad.habits import MICROBATCHES, VOCAB, WIDTH, Everything, Habit
from tests.unit_tests.weight_grad.steps import assert_same, count_hooks, gradients, new, run_split, step, step_on_ones

# -- the same numbers; ``test_habits.py`` has those of one step --------------------------------------------------------


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch keeps gradients as their parameter is")
def test_gradients_add_up_in_the_dtype_that_a_parameter_asks_for() -> None:
    """Autograd does the same. FSDP2 asks for float32 under mixed precision, from torch 2.15 on."""
    grads = [torch.full((4, 3), 2.0**-k, dtype=torch.bfloat16) for k in (0, 9)]  # the sum is no bfloat16
    both = [nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16)) for _ in range(2)]
    for parameter in both:
        parameter.grad_dtype = torch.float32
    for grad in grads:
        (both[0] * grad).sum().backward()
        add_hooked(both[1], grad)
    theirs, ours = (parameter.grad for parameter in both)
    assert ours is not None
    assert theirs is not None
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours, theirs)


def test_the_first_gradient_has_the_strides_of_its_parameter_and_is_copied_only_for_them() -> None:
    transposed, same = torch.ones(4, 3).t(), torch.ones(3, 4)
    expected = nn.Parameter(torch.zeros(3, 4))
    (expected * transposed).sum().backward()
    parameters = [nn.Parameter(torch.zeros(3, 4)) for _ in range(3)]
    sparse = torch.ones(3, 4).to_sparse()
    for parameter, grad in zip(parameters, (transposed, same, sparse), strict=True):
        add_hooked(parameter, grad)
    assert parameters[0].grad.stride() == expected.grad.stride() == (4, 1)
    assert parameters[1].grad.data_ptr() == same.data_ptr()
    assert parameters[2].grad.is_sparse


def test_an_input_of_one_dimension() -> None:
    model = nn.Linear(3, 2)
    run_split(split_weight_grad(model), lambda mb: model(torch.ones(3)).sum(), 2)
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))
    assert torch.equal(model.bias.grad, torch.full((2,), 2.0))


def test_a_parameter_that_is_frozen_between_b_and_w_gets_the_gradient_of_its_b() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    with store.step({0: 0}):
        loss = model(torch.ones(1, 2)).sum()
        with store.backward(0, 0):
            loss.backward()
        model.weight.requires_grad_(False)
        store.run(0, 0)
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_the_input_gradient_of_a_transposed_input_is_transposed_too() -> None:
    """Autograd does the same. With the other order of the product a GPU may round otherwise."""
    strides: list[tuple[int, ...]] = []

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.ones(6, 10, requires_grad=True).t()
        x.register_hook(lambda grad: strides.append(grad.stride()))
        return model(x).sum()

    model = nn.Linear(6, 4)
    loss_of(model).backward()
    run_split(split_weight_grad(model), lambda mb: loss_of(model))
    assert strides == [(1, 10)] * 2


class _WideGradient(torch.autograd.Function):
    """A product whose gradient for the weight is in float32, as of a kernel that accumulates in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() * weight.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (grad * weight.float()).to(x.dtype), (grad * x.float()).sum((0, 1))


class _InBfloat16(Habit):
    """A linear layer that runs ``times`` times, and a product with a vector of its own."""

    dtype = torch.bfloat16
    times = 1

    def __init__(self) -> None:
        super().__init__()
        self.repeated = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for _ in range(self.times):
            x = self.repeated(torch.tanh(x))
        y: Tensor = _WideGradient.apply(x, self.scale)
        return y


class _TwiceInBfloat16(_InBfloat16):
    times = 2


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch keeps gradients as their parameter is")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("kind", [_InBfloat16, _TwiceInBfloat16])
def test_the_gradient_of_each_backward_has_the_dtype_that_a_parameter_asks_for(
    kind: type[_InBfloat16], dtype: torch.dtype | None, split: bool
) -> None:
    """Autograd casts gradients to it before it adds up those of one backward."""
    expected, model = new(kind), new(kind)
    assert isinstance(model, _InBfloat16)
    for one in (expected, model):
        for parameter in one.parameters():
            parameter.grad_dtype = dtype
    store = split_weight_grad(model)
    for _ in range(2):
        step(expected, None)
        step(model, store, (split,) * MICROBATCHES)
    assert_same(gradients(expected), gradients(model))
    assert model.scale.grad is not None
    assert model.scale.grad.dtype is (dtype or torch.float32)


def test_two_steps_without_zero_grad_give_twice_the_gradient() -> None:
    expected, model = new(Everything), new(Everything)
    store = split_weight_grad(model)
    for _ in range(2):
        step(expected, None)
        step(model, store)
    assert_same(gradients(expected), gradients(model))


def test_outside_of_a_step_nothing_is_different() -> None:
    expected, model = new(Everything), new(Everything)
    split_weight_grad(model)
    fired = count_hooks(model)
    step(expected, None)
    step(model, None)
    assert_same(gradients(expected), gradients(model))
    assert set(fired.values()) == {MICROBATCHES}
    assert isinstance(model.up, nn.Linear)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert model.head.weight is model.embedding.weight
    model.load_state_dict(expected.state_dict())


def test_evaluation_touches_no_gradient() -> None:
    model = new(Everything)
    store = split_weight_grad(model)
    with torch.no_grad(), store.step({0: 0}):
        assert not model(model.batch(0)).requires_grad
    assert gradients(model) == {}


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


def test_the_gradient_of_an_embedding_waits_for_its_w() -> None:
    model = nn.Embedding(4, 2)
    store = split_weight_grad(model)
    with store.step({0: 1}):
        for mb in (0, 1):
            loss = model(torch.tensor([[1, 1, 3]])).sum()
            with store.backward(0, mb):
                loss.backward()
        assert model.weight.grad is None
        store.run(0, 0)
        assert model.weight.grad.sum(1).tolist() == [0.0, 4.0, 0.0, 2.0]
        store.run(0, 1)
    assert model.weight.grad.sum(1).tolist() == [0.0, 8.0, 0.0, 4.0]


def test_layers_that_are_frozen_or_run_outside_of_a_step_are_not_called_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    store = split_weight_grad(model)
    indices = torch.tensor([[1, 3]])
    model(indices).sum().backward()
    for frozen in (model[0], model[1], model[2].bias):
        frozen.requires_grad_(False)
    run_split(store, lambda mb: model(indices).sum())
    assert caplog.messages == []


def test_an_accumulation_hook_finds_the_parameter_itself_in_its_layer() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    found: list[bool] = []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: found.append(model.weight is parameter))
    step_on_ones(model, store)
    assert found == [True]


def test_the_timer_runs_around_each_w() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    store.timers = timers = Timers()
    model.weight.register_hook(lambda grad: timers.lines.append("gradient"))
    run_split(store, lambda mb: model(torch.ones(1, 2)).sum(), 2)
    assert timers.lines == ["weight-compute start", "gradient", "weight-compute stop"] * 2
    assert timers.levels == {"weight-compute": 2}


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

    def without_w() -> None:
        with store.step({0: 0}):
            loss = model(torch.ones(1, 2)).sum()
            with store.backward(0, 0):
                loss.backward()

    with pytest.raises(WeightGradError, match=r"\[\(0, 0\)\] were left behind"):
        without_w()
    plain = model(torch.ones(1, 2)).sum()
    plain.backward()  # the store is out of the way again
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_backward_outside_of_the_store_is_an_error() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    with pytest.raises(WeightGradError, match=r"outside of the step's store\.backward"), store.step({0: 0}):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(WeightGradError, match=r"outside of the step's store\.backward"), store.step({0: 0}):  # noqa: PT012 (after another backward)
        with store.backward(0, 0):
            pass
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(WeightGradError, match="call begin_step first"), store.backward(0, 0):
        pass


def test_a_failed_step_leaves_nothing_behind() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    with pytest.raises(ZeroDivisionError), store.step({0: 1}):  # noqa: PT012 (it fails after a backward)
        loss = model(torch.ones(1, 2)).sum()
        with store.backward(0, 0):
            loss.backward()
        raise ZeroDivisionError
    assert not store.armed
    step_on_ones(model, store)
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_a_forward_finds_the_attributes_of_a_parameter_of_a_class_of_its_own() -> None:
    model = nn.LayerNorm(2)
    weight: Any = TwoTensor(torch.ones(2), torch.ones(2))
    model.weight = nn.Parameter(weight)
    model.weight.sequence_parallel = True  # type: ignore[assignment]
    store = split_weight_grad(model)
    found: list[bool] = []

    def loss_of(mb: int) -> Tensor:
        found.append(model.weight.sequence_parallel)  # type: ignore[arg-type]
        return model.weight.sum()

    run_split(store, loss_of)
    assert found == [True]


# -- memory -----------------------------------------------------------------------------------------------------------


class _Box:
    """What autograd holds instead of a saved tensor: alive as long as the graph wants it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @staticmethod
    def unpack(box: _Box) -> Tensor:
        return box.tensor


def kept_bytes(store: WeightGradStore) -> int:
    """Each storage once."""
    storages = [tensor.untyped_storage() for tensor in store.kept_tensors(0, 0)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


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
        assert kept_bytes(store) == 4 * 4 * rows * wide  # two inputs, two output gradients
        store.run(0, 0)
        assert kept_bytes(store) == 0
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
    run_split(store, lambda mb: model(inputs[mb]).pow(2).sum(), 3, split=split)
    assert [part.forwards for part in model] == [6, 6]
    assert_same(gradients(expected), gradients(model))


# -- accumulation hooks: once, after the last W, with the whole gradient ----------------------------------------------


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


# -- the communication that W needs runs while the W before it is computed --------------------------------------------


class Gathering:
    """In place of an all-gather over a group of one rank; notes when it begins and when it is waited for."""

    events: list[str]

    def __init__(self, part: Tensor, group: str) -> None:
        self.part, self.group = part, group
        self.events.append(f"begin {group}")

    def wait(self) -> Tensor:
        self.events.append(f"wait {self.group}")
        return self.part


def test_w_begins_the_next_gather_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Gathering.events = []
    compute = DeferredLinear.compute

    def noted(deferred: DeferredLinear, fused: bool = True) -> Iterator[tuple[Tensor, Any]]:
        deferred.group = deferred.name
        for result in compute(deferred, fused):
            events.append(f"done {deferred.name}")
            yield result

    def prepare(deferred: DeferredLinear) -> None:
        deferred.group = deferred.name
        plain_prepare(deferred)

    plain_prepare = DeferredLinear.prepare
    monkeypatch.setattr(linear, "Gathering", Gathering)
    monkeypatch.setattr(DeferredLinear, "compute", noted)
    monkeypatch.setattr(DeferredLinear, "prepare", prepare)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    store = split_weight_grad(model)
    with store.step({0: 0}):
        loss = model(torch.ones(1, 2)).sum()
        with store.backward(0, 0):
            loss.backward()
        assert events == []
        store.run(0, 0)
    assert events == [
        "begin 1", "begin 2", "wait 2", "done 2", "begin 0", "wait 1", "done 1", "wait 0", "done 0",
    ]  # fmt: skip
