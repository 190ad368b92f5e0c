"""Layers that delay their weight gradients themselves: Transformer Engine's own Python, on the CPU."""

from __future__ import annotations

import itertools
import queue
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.errors import WeightGradSplitError
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run
from megatron_pp.weight_grad import check_wrappers, split_weight_grad, store, transformer_engine, unsplit_weight_grad
from megatron_pp.weight_grad.transformer_engine import delays_weight_grad
from testkit.stand_ins.transformer_engine_python import on_cpu
from testkit.sweeps import EXHAUSTIVE
from tests.unit_tests.weight_grad.steps import run_split, with_main_grads

# Importing it takes seconds: on one worker.
pytestmark = pytest.mark.xdist_group("transformer_engine")
WIDTH, MICROBATCHES = 8, 3
SPLITTING = [name for name, family in SCHEDULES.items() if family.search is None and family.splits_weight]


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with on_cpu() as module:
        yield module


def new_model(te: Any, delay: bool = True, fuse: bool = False, bias: bool = True, kind: Any = torch.float32) -> Any:
    common = {"delay_wgrad_compute": delay, "fuse_wgrad_accumulation": fuse, "bias": bias}
    common |= {"params_dtype": kind, "device": torch.device("cpu")}
    layers = te.LayerNormLinear(WIDTH, WIDTH, **common), te.LayerNormMLP(WIDTH, 2 * WIDTH, **common)
    model = nn.Sequential(te.Linear(WIDTH, WIDTH, **common), *layers, nn.Linear(WIDTH, WIDTH, dtype=kind))
    generator = torch.Generator().manual_seed(5)  # not torch's own: ranks are threads in some tests
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


class MegatronHook:
    """What Megatron's DistributedDataParallel calls for each gradient of a parameter, with overlap_grad_reduce."""

    def __init__(self, parameter: Tensor, fired: Counter[Tensor]) -> None:
        self.parameter, self.fired = parameter, fired

    def __call__(self, *_: Any) -> None:
        parameter: Any = self.parameter
        assert parameter.grad is not None
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        self.fired[parameter] += 1


def with_megatrons_hooks(model: nn.Module) -> Counter[Tensor]:
    """Register hooks as Megatron does: with the layer if the layer asks for it, else with autograd."""
    fired: Counter[Tensor] = Counter()
    for layer in model:
        for parameter in layer.parameters():
            hook = MegatronHook(parameter, fired)
            if getattr(parameter, "skip_backward_post_hook", False):
                layer.register_wgrad_accumulation_and_reduce_hooks(hook)
            else:
                parameter.register_post_accumulate_grad_hook(hook)
    return fired


def loss_of(model: nn.Module, mb: int, **marks: bool) -> Tensor:
    """``marks``: what the layers of Transformer Engine get to know of the microbatch."""
    *layers, last = model
    x = torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(mb)).to(last.weight.dtype)
    for layer in layers:
        x = layer(x, **marks)
    return last(x).float().pow(2).sum()


def split_step(model: nn.Module, w_order: tuple[int, ...] | None, mark_first: bool = False, built: bool = True) -> None:
    """All forwards, all backwards, then W in this order; None: whole backwards. ``built``: with delay_wgrad_compute."""
    its_store = split_weight_grad(model)
    assert (its_store.report.delayed, its_store.report.switched) == (3, 0 if built else 3)
    marks = [{"is_first_microbatch": mb == 0} if mark_first else {} for mb in range(MICROBATCHES)]
    run_split(its_store, lambda mb: loss_of(model, mb, **marks[mb]), MICROBATCHES, w_order, w_order is not None)
    unsplit_weight_grad(model)


def whole_step(model: nn.Module) -> None:
    for mb in range(MICROBATCHES):
        loss_of(model, mb).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(p, "main_grad", p.grad) for name, p in model.named_parameters()}


def whole_gradients(te: Any, mode: str = "grad", **options: Any) -> dict[str, Tensor]:
    """The gradients of the same layers without delay, by autograd and Megatron's hooks."""
    model = new_model(te, delay=False, fuse="fused" in mode, **options)
    if mode != "grad":
        with_megatrons_hooks(with_main_grads(model))
    whole_step(model)
    return gradients(model)


def differing(expected: dict[str, Tensor], got: dict[str, Tensor], exact: bool) -> list[str]:
    within: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
    same = {name: torch.allclose(expected[name], grad, **within) for name, grad in got.items() if grad is not None}
    return [name for name in expected if not same.get(name)]


ORDERS = [None, *itertools.permutations(range(MICROBATCHES))]


def harm(
    te: Any, mode: str, w_order: Any = (0, 1, 2), mutate: Any = None, built: bool = True, **options: Any
) -> list[str]:
    """The parameters with a wrong gradient, or with hooks that do not fire as often as Megatron expects."""
    model = new_model(te, delay=built, fuse="fused" in mode, **options)
    if mode != "grad":
        with_main_grads(model)
    fired = with_megatrons_hooks(model) if "hooks" in mode else None
    if mutate is not None:
        mutate(model)
    split_step(model, w_order, "first marked" in mode, built)
    found = differing(whole_gradients(te, mode, **options), gradients(model), w_order in ORDERS[:2])
    for name, parameter in model.named_parameters():
        own = fired is not None and getattr(parameter, "skip_backward_post_hook", False)
        if fired is not None and fired[parameter] != (MICROBATCHES if own else 1):
            found.append(f"hooks of {name}: {fired[parameter]}")
    return found


MODES = ["grad", "main_grad", "fused", "fused, first marked", "main_grad, hooks", "fused, hooks"]


@pytest.mark.slow
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_add_up_over_microbatches_in_every_order_of_w(te: Any, mode: str, bias: bool, built: bool) -> None:
    for w_order in ORDERS:
        assert harm(te, mode, w_order, bias=bias, built=built) == [], w_order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fuse", "built"),
    [  # of the four ways a schedule takes two, in which each is on once
        (name, fuse, built)
        for turn, name in enumerate(SPLITTING)
        for fuse, built in itertools.product((False, True), (False, True))
        if EXHAUSTIVE or (fuse == built) == (turn % 2 == 0)
    ],
)
def test_every_schedule_with_w_gives_the_gradients_of_one_process(te: Any, name: str, fuse: bool, built: bool) -> None:
    size, chunks, data = 2, SCHEDULES[name].chunks or 2, ToyData(5, hidden=WIDTH)
    stages: dict[int, nn.Module] = {}

    def block(stage: int) -> nn.Module:
        model = stages[stage] = new_model(te, built, fuse)
        return with_main_grads(model) if fuse else model

    config = {"pipeline_schedule": name, "overlap_p2p_comm": True, "hidden_size": WIDTH}
    run_in_threads(size, chunks, data, block=block, prepare=split_weight_grad, **config)
    expected = reference_run(size * chunks, data, block=lambda stage: new_model(te, delay=False))
    got = {f"{number}.{key}": grad for number, stage in stages.items() for key, grad in gradients(stage).items()}
    assert got.keys() == expected.grads.keys()
    assert differing(expected.grads, got, exact=True) == []


# -- one fault each ----------------------------------------------------------------------------------------------------


def _overwrite(parameter: Any, grad: Tensor) -> None:
    if getattr(parameter, "main_grad", None) is not None:
        parameter.main_grad.copy_(grad)
    else:
        parameter.grad = grad


def _keep_grads(grads: dict[Tensor, Tensor | None]) -> dict[Tensor, Tensor | None]:
    """``.grad`` stays from microbatch to microbatch, as ``backward_dw()`` finds it without a store."""
    return {parameter: parameter.grad for parameter in grads}


def _last_first(model: nn.Module) -> None:
    for layer in model[:2]:
        layer.wgrad_store.context = queue.LifoQueue()


def _drop_hooks(model: nn.Module) -> None:
    for layer in model[:-1]:
        layer.wgrad_accumulation_and_reduce_hooks.pop()


FAULTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {  # in layers that are built with delay_wgrad_compute
    "a gradient overwrites main_grad": ("main_grad", store, "add_silently", _overwrite),
    "a gradient overwrites .grad": ("grad", store, "add_silently", _overwrite),
    ".grad is not taken aside": ("main_grad", transformer_engine, "_swap", _keep_grads),
    "nobody fires the hooks of a norm": ("fused, hooks", store, "hooked_names", lambda layer: list(layer._parameters)),
}
FAULTS_OF_SWITCHED: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    name: ("fused, hooks", transformer_engine.DelayedRun, name, instead)
    for name, instead in (("takes", lambda self, parameter, grad: False), ("_backward_dw", lambda self: lambda: None))
}


@pytest.mark.parametrize("fault", [*FAULTS, *FAULTS_OF_SWITCHED])
def test_a_fault_is_seen(te: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, place, name, instead = {**FAULTS, **FAULTS_OF_SWITCHED}[fault]
    monkeypatch.setattr(place, name, instead)
    try:
        found = harm(te, mode, built=fault in FAULTS)
    except (AssertionError, AttributeError, RuntimeError) as error:  # of the hook, of Transformer Engine
        found = [str(error)]
    assert found != []


def test_w_last_in_first_out_overwrites_what_the_first_microbatch_adds_to(te: Any) -> None:
    assert harm(te, "fused, first marked", bias=False, mutate=_last_first) == ["0.weight", "1.weight"]


def test_a_dropped_hook_is_seen(te: Any) -> None:
    found = harm(te, "main_grad, hooks", mutate=_drop_hooks)
    assert [line for line in found if line.startswith("hooks of ")] == [
        "hooks of 0.bias: 0", "hooks of 1.bias: 0", "hooks of 2.fc2_bias: 0",
    ]  # fmt: skip


# -- what is converted, and what is refused ----------------------------------------------------------------------------


def test_half_precision_weights_add_into_a_float32_main_grad(te: Any) -> None:
    for mode in MODES[1:]:
        assert harm(te, mode, kind=torch.bfloat16) == [], mode


def test_a_second_step_adds_to_what_is_there(te: Any) -> None:
    model = new_model(te)
    for _ in range(2):
        split_step(model, (0, 1, 2))
    expected = {name: 2 * grad for name, grad in whole_gradients(te).items()}
    assert differing(expected, gradients(model), exact=False) == []


def test_a_layer_that_is_used_twice_in_a_microbatch(te: Any) -> None:
    class Twice(nn.Module):
        def __init__(self, delay: bool) -> None:
            super().__init__()
            self.layers = new_model(te, delay)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(torch.tanh(self.layers(x)))

    expected, model = Twice(delay=False), Twice(delay=True)
    its_store = split_weight_grad(model)
    inputs = [torch.randn(3, 2, WIDTH) for _ in range(2)]
    for x in inputs:
        expected(x).pow(2).sum().backward()
    run_split(its_store, lambda mb: model(inputs[mb]).pow(2).sum(), 2)
    assert differing(gradients(expected), gradients(model), exact=False) == []


@pytest.mark.parametrize("frozen", [("0.bias", "1.layer_norm_bias"), ("2.fc1_weight", "2.fc2_weight")])
def test_frozen_parameters_have_no_gradient(te: Any, frozen: tuple[str, ...]) -> None:
    expected, model = new_model(te, delay=False), new_model(te)
    for name in frozen:
        for each in (expected, model):
            each.get_parameter(name).requires_grad_(False)
    whole_step(expected)
    split_step(model, (0, 1, 2))
    found = gradients(model)
    assert [found.pop(name) for name in frozen] == [None, None]
    torch.testing.assert_close(found, {name: grad for name, grad in gradients(expected).items() if name in found})


def test_megatrons_empty_backward_dw_is_no_delay() -> None:
    assert not delays_weight_grad(SimpleNamespace(backward_dw=lambda: None))  # type: ignore[arg-type]


def test_a_queue_that_does_not_move_is_an_error(te: Any) -> None:
    model = new_model(te)
    model[1].backward_dw = lambda: None
    with pytest.raises(RuntimeError, match=r"LayerNormLinear\.backward_dw\(\) left its queue as it was"):
        split_step(model, (0, 1, 2))


def test_torchs_distributed_data_parallel_is_refused_around_such_layers(te: Any) -> None:
    model = new_model(te)
    its_store = split_weight_grad(model)
    wrapped = object.__new__(DistributedDataParallel)
    check_wrappers(its_store, [model])
    with pytest.raises(WeightGradSplitError, match="3 layers with delay_wgrad_compute"):
        check_wrappers(its_store, [wrapped])
