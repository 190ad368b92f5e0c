"""Weight gradients that go into ``main_grad``: Megatron's protocol, and the fused kernel's arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_pp.errors import FusedWeightGradError
from megatron_pp.weight_grad import WeightGradStore, fused_kernels, linear, split_weight_grad
from megatron_pp.weight_grad.linear import add_weight_grad
from testkit.stand_ins.transformer_engine_python import on_cpu as transformer_engine_on_cpu
from tests.unit_tests.weight_grad.steps import run_split, with_main_grads

MICROBATCHES = 3


def new_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return with_main_grads(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False)).to(dtype))


def batch(mb: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(mb)).to(dtype)


def split_step(model: nn.Module, store: WeightGradStore, dtype: torch.dtype = torch.float32) -> None:
    run_split(store, lambda mb: model(batch(mb, dtype)).float().pow(2).mean(), MICROBATCHES)


class MegatronHook:
    """What Megatron's DistributedDataParallel does when a parameter's gradient has been accumulated."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.signals: list[bool] = []

    def __call__(self, parameter: Tensor) -> None:
        self.signals.append(parameter.grad_added_to_main_grad)  # type: ignore[attr-defined]
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        self.ready.append(id(parameter))


def main_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.main_grad for name, p in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_are_those_of_megatrons_hook_to_the_last_bit(dtype: torch.dtype) -> None:
    expected, model = new_model(dtype), new_model(dtype)
    for parameter in expected.parameters():
        parameter.register_post_accumulate_grad_hook(MegatronHook())
    for mb in range(MICROBATCHES):
        expected(batch(mb, dtype)).float().pow(2).mean().backward()
    hook = MegatronHook()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    split_step(model, split_weight_grad(model), dtype)
    for name, grad in main_grads(expected).items():
        assert torch.equal(main_grads(model)[name], grad), name
    assert sorted(hook.ready) == sorted(map(id, model.parameters()))  # once each
    assert all(hook.signals)
    assert all(p.grad is None for p in model.parameters())


def test_a_backward_between_the_step_and_the_optimizer_adds_to_main_grads() -> None:
    """The program's own backward, or a step after `uninstall()`. Megatron resets its signal only together with the
    gradients, so a signal that the step left behind would drop the gradients of such a backward."""
    expected, model = new_model(), new_model()
    for parameter in [*expected.parameters(), *model.parameters()]:
        parameter.register_post_accumulate_grad_hook(MegatronHook())
    for mb in range(MICROBATCHES):
        expected(batch(mb)).pow(2).mean().backward()
    split_step(model, split_weight_grad(model))
    for one in (expected, model):
        one(batch(MICROBATCHES)).abs().mean().backward()
    for name, grad in main_grads(expected).items():
        assert torch.equal(main_grads(model)[name], grad), name


def test_without_a_hook_no_grad_is_left() -> None:
    model = new_model()
    split_step(model, split_weight_grad(model))
    assert all(p.grad is None for p in model.parameters())
    assert all(p.main_grad.abs().sum() > 0 for p in model.parameters())


def test_a_grad_that_a_parameter_has_beside_its_main_grad_is_left_as_it_is() -> None:
    model = new_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    split_step(model, split_weight_grad(model))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_tensor_hooks_run_on_the_gradients_of_every_step() -> None:
    expected, model = new_model(), new_model()
    calls: list[Tensor] = []
    for parameter in [*expected.parameters(), *model.parameters()]:
        parameter.register_hook(lambda grad: calls.append(grad) or grad.clamp(-0.01, 0.01))
    for parameter in expected.parameters():
        parameter.register_post_accumulate_grad_hook(MegatronHook())
    store = split_weight_grad(model)
    for _ in range(2):
        for mb in range(MICROBATCHES):
            expected(batch(mb)).pow(2).mean().backward()
        theirs = len(calls)
        calls.clear()
        split_step(model, store)
        assert len(calls) == theirs
        calls.clear()
    for name, grad in main_grads(expected).items():
        assert torch.equal(main_grads(model)[name], grad), name


class FakeKernels:
    """Stands for apex's extension module: notes what it is called with, and does what its kernels do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...], bool]] = []

    def _add(self, name: str, layer_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        contiguous = layer_input.is_contiguous() and grad_output.is_contiguous()
        self.calls.append((name, tuple(layer_input.shape), tuple(grad_output.shape), contiguous))
        main_grad += (grad_output.float().t() @ layer_input.float()).to(main_grad.dtype)

    def wgrad_gemm_accum_fp32(self, layer_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype == torch.float32
        self._add("fp32", layer_input, grad_output, main_grad)

    def wgrad_gemm_accum_fp16(self, layer_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype in (torch.float16, torch.bfloat16)
        self._add("fp16", layer_input, grad_output, main_grad)


@pytest.mark.parametrize(
    ("main_dtype", "kernel"), [(torch.float32, "fp32"), (torch.bfloat16, "fp16"), (torch.float16, "fp16")]
)
def test_the_kernel_is_that_of_the_main_grads_dtype(main_dtype: torch.dtype, kernel: str) -> None:
    kernels, main_grad = FakeKernels(), torch.ones(4, 6, dtype=main_dtype)
    x, g = torch.randn(6, 10).t(), torch.randn(4, 10).t()  # not contiguous: the kernels want them so
    add_weight_grad(kernels, x, g, main_grad)
    assert kernels.calls == [(kernel, (10, 6), (10, 4), True)]
    torch.testing.assert_close(main_grad.float(), 1 + g.t() @ x, rtol=2e-2, atol=2e-2)


# -- without apex ------------------------------------------------------------------------------------------------------


class Calls:
    """Records which of torch's products ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("addmm.dtype_out", self.addmm, "CPU")
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(linear, "_transformer_engine_gemm", lambda: None)

    def addmm(self, start: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor, **scales: int) -> Tensor:
        """torch has it for CUDA alone: half-precision factors, their products added in ``dtype``."""
        assert start is out
        assert a.dtype == b.dtype
        self.names.append(f"addmm to {dtype}")
        return out.copy_(start + a.to(dtype) @ b.to(dtype))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls(monkeypatch)
    yield made
    made.library._destroy()


@pytest.mark.parametrize(
    ("inputs", "main", "widens", "names"),
    [
        ("bfloat16", "float32", True, ["addmm to torch.float32"]),
        ("float16", "float32", True, ["addmm to torch.float32"]),
        ("bfloat16", "float32", False, []),
        ("float32", "float32", True, []),
        ("bfloat16", "bfloat16", True, []),
        ("float16", "bfloat16", True, []),
        ("float64", "float32", True, []),
    ],
)
def test_on_a_gpu_torch_adds_half_precision_products_in_float32_and_casts_others(
    calls: Calls, inputs: str, main: str, widens: bool, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others, and without Transformer Engine all where torch is too old for it."""
    monkeypatch.setattr(linear, "_ADDMM_WIDENS", widens)
    x, g = torch.randn(10, 6).to(getattr(torch, inputs)), torch.randn(10, 4).to(getattr(torch, inputs))
    main_grad = torch.ones(4, 6, dtype=getattr(torch, main))
    add_weight_grad(None, x, g, main_grad)
    assert calls.names == names
    within = 1e-5 if (main, inputs) == ("float32", "bfloat16") else 2e-2
    torch.testing.assert_close(main_grad.double(), 1 + g.double().t() @ x.double(), rtol=within, atol=within)


def test_torch_accepts_addmm_with_out_dtype() -> None:
    x, g, main_grad = (torch.empty(n, m, dtype=torch.bfloat16, device="meta") for n, m in ((10, 6), (10, 4), (4, 6)))
    main_grad = main_grad.float()
    assert torch.addmm(main_grad, g.t(), x, out_dtype=torch.float32, out=main_grad) is main_grad


@pytest.mark.xdist_group("transformer_engine")
def test_with_an_older_torch_transformer_engine_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its own ``general_gemm``; only the kernel below it is a stand-in."""
    monkeypatch.setattr(linear, "_ADDMM_WIDENS", False)
    linear._transformer_engine_gemm.cache_clear()
    x, g, main_grad = torch.randn(10, 6).bfloat16(), torch.randn(10, 4).bfloat16(), torch.ones(4, 6)
    with transformer_engine_on_cpu():
        assert linear._transformer_engine_gemm() is not None
        add_weight_grad(None, x, g, main_grad)
    torch.testing.assert_close(main_grad, 1 + g.float().t() @ x.float())
    linear._transformer_engine_gemm.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_torchs_own_kernel_adds_into_float32() -> None:
    x, g = torch.randn(64, 32).bfloat16().cuda(), torch.randn(64, 16).bfloat16().cuda()
    main_grad = torch.ones(16, 32, device="cuda")
    add_weight_grad(None, x, g, main_grad)
    torch.testing.assert_close(main_grad, 1 + g.float().t() @ x.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_plain_form_adds_like_the_kernel(dtype: torch.dtype) -> None:
    x, g = torch.randn(10, 6).to(dtype), torch.randn(10, 4).to(dtype)
    plain, fused = torch.ones(4, 6), torch.ones(4, 6)
    add_weight_grad(None, x, g, plain)
    add_weight_grad(FakeKernels(), x, g, fused)
    torch.testing.assert_close(plain, fused, rtol=1e-6, atol=1e-6)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(FusedWeightGradError, match="float64"):
        add_weight_grad(None, torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("from_config", [False, True])
def test_fused_accumulation_gives_the_same_gradients(from_config: bool) -> None:
    expected, model = new_model(), new_model()
    split_step(expected, split_weight_grad(expected, gradient_accumulation_fusion=False))
    if from_config:
        model.config = SimpleNamespace(gradient_accumulation_fusion=True)
        store = split_weight_grad(model)
    else:
        store = split_weight_grad(model, gradient_accumulation_fusion=True)
    hook = MegatronHook()
    model[0].weight.register_post_accumulate_grad_hook(hook)
    split_step(model, store)
    for name, grad in main_grads(expected).items():
        torch.testing.assert_close(main_grads(model)[name], grad, rtol=1e-6, atol=1e-7)
    assert len(hook.ready) == 1


def test_a_fused_layer_that_is_used_twice_adds_both_gradients() -> None:
    layer = with_main_grads(nn.Linear(3, 3))
    hook = MegatronHook()
    layer.weight.register_post_accumulate_grad_hook(hook)
    layer.weight.grad_added_to_main_grad = False  # type: ignore[assignment]
    x = torch.ones(2, 3)
    store = split_weight_grad(layer, gradient_accumulation_fusion=True)
    run_split(store, lambda mb: (layer(x) + layer(2 * x)).sum(), 2)
    assert torch.equal(layer.weight.main_grad, torch.full((3, 3), 12.0))  # type: ignore[arg-type]
    assert len(hook.ready) == 1


@pytest.mark.parametrize(("apex", "is_there"), [(FakeKernels(), True), (FakeKernels(), False), (None, True)])
def test_apex_is_used_only_where_it_is_and_there_is_a_device_for_it(
    apex: Any, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", apex)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    assert fused_kernels() is (apex if is_there else None)


class _FusesItself(torch.autograd.Function):
    """A layer's own fused backward: writes ``main_grad`` and gives autograd nothing for the weight. If the weight has
    Megatron's signal, it sets the signal and gives autograd memory with any content, as Megatron's does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        ctx.main_grad += (grad * x).sum(0)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return grad * weight, None
        weight.grad_added_to_main_grad = True
        return grad * weight, torch.full_like(weight, 7.0)


class _FusedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.main_grad = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return _FusesItself.apply(x, self.weight)


@pytest.mark.parametrize("signals", [False, True])
def test_a_layer_that_writes_main_grad_itself_is_not_split(signals: bool) -> None:
    model = _FusedScale()
    if signals:  # as DistributedDataParallel sets it together with main_grad
        model.weight.grad_added_to_main_grad = False  # type: ignore[assignment]
    store = split_weight_grad(model)
    hook = MegatronHook()
    model.weight.register_post_accumulate_grad_hook(hook)
    run_split(store, lambda mb: model(torch.full((2, 3), 2.0)).sum(), 2)
    assert torch.equal(model.weight.main_grad, torch.full((3,), 8.0))  # type: ignore[arg-type]
    assert len(hook.ready) == 1


def test_a_gradient_beside_a_fused_one_counts_where_megatron_adds_both() -> None:
    """A tied weight: the output layer's backward is fused, and the embedding's gradient comes from autograd. Megatron
    marks such a weight with ``zero_out_wgrad``, for which the fused backward gives autograd zeros."""
    model = _FusedScale()
    model.weight.grad_added_to_main_grad = True  # type: ignore[assignment]
    model.weight.zero_out_wgrad = True  # type: ignore[assignment]
    store = split_weight_grad(model)
    run_split(store, lambda mb: (torch.full((2, 3), 2.0) * model.weight).sum(), 2)
    assert torch.equal(model.weight.main_grad, torch.full((3,), 8.0))  # type: ignore[arg-type]


# -- Transformer Engine's layers as they are, compiled part included --------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("fuse", [False, True])
def test_gradients_are_those_of_the_layers_without_delay(fuse: bool) -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")

    def model(delay: bool, fuse: bool) -> nn.Module:
        options = {"delay_wgrad_compute": delay, "fuse_wgrad_accumulation": fuse, "device": "cuda"}
        return nn.Sequential(
            te.Linear(32, 64, **options), te.LayerNormMLP(64, 128, **options), te.LayerNormLinear(64, 32, **options)
        )

    expected, delayed = model(False, False), model(True, fuse)
    delayed.load_state_dict(expected.state_dict())
    for parameter in delayed.parameters() if fuse else ():
        parameter.main_grad = torch.zeros_like(parameter)
    store = split_weight_grad(delayed)
    assert store.report.delayed == 3
    inputs = [torch.randn(16, 32, device="cuda") for _ in range(3)]
    for x in inputs:
        expected(x).pow(2).sum().backward()
    run_split(store, lambda mb: delayed(inputs[mb]).pow(2).sum(), 3)
    for (name, one), (_, other) in zip(expected.named_parameters(), delayed.named_parameters(), strict=True):
        torch.testing.assert_close(other.main_grad if fuse else other.grad, one.grad, msg=name)
