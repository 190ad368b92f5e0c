"""Checks of Megatron-core's own layers after ``split_weight_grad``, which run on ranks in the processes of
testkit/megatron/runner.py: gradients equal those of the same layers as Megatron runs them, to the last bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_pp.weight_grad import WeightGradStore, split_weight_grad
from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case

WIDTH, MICROBATCHES = 8, 3


# -- tensor-parallel layers --------------------------------------------------------------------------------------------


class Kernels:
    """Replaces apex's extension module: it adds in place, as apex's kernels do."""

    def wgrad_gemm_accum_fp32(self, layer_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype == torch.float32
        main_grad.addmm_(grad_output.t(), layer_input)


class Pair(nn.Module):
    """A column-parallel layer and a row-parallel one, as in Megatron's MLP. It adds the biases that they return."""

    def __init__(self, config: TransformerConfig, bias: bool, skip_bias_add: bool, expert: bool) -> None:
        super().__init__()
        common: dict[str, Any] = {"config": config, "bias": bias, "is_expert": expert, "init_method": nn.init.normal_}
        skip = {"skip_bias_add": skip_bias_add}
        column, row = megatron_layers.ColumnParallelLinear, megatron_layers.RowParallelLinear
        self.up = column(WIDTH, 4 * WIDTH, **common, **skip)
        self.down = row(4 * WIDTH, WIDTH, input_is_parallel=True, **common, skip_bias_add=skip_bias_add or expert)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        for layer, then in ((self.up, torch.tanh), (self.down, torch.sin)):
            x, bias = layer(x)
            x = then(x if bias is None else x + bias)
        return x


@contextmanager
def _fusion(on: bool) -> Iterator[None]:
    """Let Megatron accept gradient accumulation fusion if ``on``; it refuses it without apex."""
    with (
        mock.patch.object(megatron_layers, "_grad_accum_fusion_available", on),
        mock.patch.object(megatron_layers, "fused_weight_gradient_mlp_cuda", Kernels(), create=True),
    ):
        yield


def _losses(model: nn.Module, shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the loss and the input of each microbatch."""
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(mb)) for mb in range(MICROBATCHES)]
    return [model(x.requires_grad_()).square().sum() for x in inputs], inputs


def _split_step(store: WeightGradStore, losses: list[Tensor], split: bool) -> None:
    for mb, loss in enumerate(losses):
        with store.backward(0, mb, split=split):
            loss.backward()
    for mb in range(MICROBATCHES) if split else ():
        store.run(0, mb)


def _gradients(model: nn.Module, fused: bool) -> dict[str, Tensor]:
    return {name: p.main_grad if fused and p.dim() > 1 else p.grad for name, p in model.named_parameters()}  # type: ignore[misc]


def tensor_parallel_layers(case: Case) -> dict[str, int]:
    """Compare each form of the two layers, split and whole. Return the number of gradients compared per form."""
    megatron_lab.set_up_parallel_state(case)
    compared: dict[str, int] = {}
    flags = (False, True)
    for sequence, (bias, skip), fused, expert in itertools.product(
        flags, ((False, False), (True, False), (True, True)), flags, flags
    ):
        form = f"{sequence=} {bias=} {skip=} {fused=} {expert=}"
        for one, split in itertools.product(flags, flags):
            frozen, asked = one and not fused, one and fused  # fusion by the config, or by split_weight_grad's argument
            with _fusion(fused):
                pairs = [
                    Pair(_config(case, sequence_parallel=sequence, gradient_accumulation_fusion=on), bias, skip, expert)
                    for on in (fused and not asked, fused)
                ]
                number = _compare(pairs, sequence and not expert, fused, frozen, split)
            compared[f"{form} {frozen=} {asked=} {split=}"] = number
    return compared


def _config(case: Case, **fields: Any) -> TransformerConfig:
    wide = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 2, "tensor_model_parallel_size": case.tp}
    return TransformerConfig(**wide, **fields)


def _same_weights(one: nn.Module, other: nn.Module) -> None:
    with torch.no_grad():
        for parameter, its_copy in zip(one.parameters(), other.parameters(), strict=True):
            its_copy.copy_(parameter.normal_(std=0.3))


def _compare(pairs: list[Pair], sequence: bool, fused: bool, frozen: bool, split: bool) -> int:
    model, expected = pairs
    _same_weights(model, expected)
    for each in pairs:
        each.up.weight.requires_grad_(not frozen)
        for parameter in (each.up.weight, each.down.weight) if fused else ():
            parameter.main_grad = torch.zeros_like(parameter)
    flags = [(p.allreduce, getattr(p, "sequence_parallel", None)) for p in model.parameters()]  # type: ignore[attr-defined]
    shape = (6 // (2 if sequence else 1), 2, WIDTH)
    losses, wanted_inputs = _losses(expected, shape)
    for loss in losses:
        loss.backward()
    store = split_weight_grad(model, gradient_accumulation_fusion=fused)
    assert store.report.whole_layers == ()
    with store.step({0: MICROBATCHES - 1}):
        losses, inputs = _losses(model, shape)
        assert [(p.allreduce, getattr(p, "sequence_parallel", None)) for p in (*_leaves(model),)] == flags
        _split_step(store, losses, split)
        assert not store._logged, store._logged
    assert all(torch.equal(one.grad, x.grad) for one, x in zip(wanted_inputs, inputs, strict=True))  # type: ignore[arg-type]
    wanted, got = _gradients(expected, fused), _gradients(model, fused)
    for name, grad in wanted.items():
        if grad is None:
            assert got[name] is None, name
        else:
            assert torch.equal(grad, got[name]), (name, float((grad - got[name]).abs().max()))
            assert float(grad.abs().max()) > 0, name
    return len(wanted)


def _leaves(model: Pair) -> list[Any]:
    """Return the parameters as the layers' forwards see them."""
    names = ((layer, name) for layer in (model.up, model.down) for name in layer._parameters)
    return [leaf for layer, name in names if (leaf := getattr(layer, name)) is not None]


# -- experts -----------------------------------------------------------------------------------------------------------


class GroupedBackend:
    """Replaces ``grouped_gemm.backend``, and records what each product is for."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def gmm(self, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        assert torch.count_nonzero(batch_sizes) != 0
        assert a.is_contiguous()
        sizes = batch_sizes.tolist()
        self.ran.append("weight" if trans_a else "input" if trans_b else "output")
        if trans_a:
            return torch.stack([x.t() @ y for x, y in zip(a.split(sizes), b.split(sizes), strict=True)])
        return torch.cat([x @ (b[e].t() if trans_b else b[e]) for e, x in enumerate(a.split(sizes))])


BACKEND = GroupedBackend()


class GroupedGemm(torch.autograd.Function):
    """Replaces ``grouped_gemm.ops``: its backward computes both gradients at once."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
        ctx.save_for_backward(a, b, batch_sizes)
        assert not trans_b
        return BACKEND.gmm(a, b, batch_sizes, trans_a=False, trans_b=trans_b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, (a, b, batch_sizes) = grads[0].contiguous(), ctx.saved_tensors
        input_grad = BACKEND.gmm(grad, b, batch_sizes, trans_a=False, trans_b=True) if ctx.needs_input_grad[0] else None
        return input_grad, BACKEND.gmm(a, grad, batch_sizes, trans_a=True, trans_b=False), None, None


def _gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    return GroupedGemm.apply(a, b, batch_sizes, trans_b)  # type: ignore[no-any-return]


def grouped_experts(case: Case) -> dict[str, list[str]]:
    """Compare Megatron's GroupedMLP, split and whole, with and without recomputation. Return the products that ran; an
    empty dict if the release has no GroupedMLP.
    """
    from megatron.core.transformer.moe import experts

    if not hasattr(experts, "GroupedMLP"):
        return {}
    megatron_lab.set_up_parallel_state(case)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ran: dict[str, list[str]] = {}
    library = SimpleNamespace(
        ops=SimpleNamespace(gmm=_gmm, backend=BACKEND), assert_grouped_gemm_is_available=lambda: None
    )
    te = {  # names of Transformer Engine that Megatron's recomputation uses
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": lambda **_: nullcontext(),
        "fp8_autocast": lambda **_: nullcontext(),
    }
    with mock.patch.object(experts, "gg", library), mock.patch.multiple(megatron_random, create=True, **te):
        for recompute in (False, True):
            selective = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]} if recompute else {}
            config = _config(
                case, num_moe_experts=2, moe_router_topk=2, add_bias_linear=False, bf16=True, moe_grouped_gemm=True,
                params_dtype=torch.bfloat16, moe_ffn_hidden_size=4 * WIDTH, **selective,
            )  # fmt: skip
            model, expected = (experts.GroupedMLP(2, config, pg_collection=groups) for _ in range(2))
            _same_weights(model, expected)
            for loss in _expert_losses(expected):
                loss.backward()
            store = split_weight_grad(model)
            assert (store.report.split, store.report.whole_layers) == (1, ())
            BACKEND.ran.clear()
            with store.step({0: MICROBATCHES - 1}):
                _split_step(store, _expert_losses(model), split=True)
            ran[f"{recompute=}"] = list(BACKEND.ran)
            for name, parameter in expected.named_parameters():
                assert torch.equal(parameter.grad, model.get_parameter(name).grad), name  # type: ignore[arg-type]
                assert float(parameter.grad.abs().max()) > 0, name  # type: ignore[union-attr]
    return ran


def _expert_losses(model: nn.Module) -> list[Tensor]:
    """Return the losses of the microbatches. The second microbatch sends these experts no token."""
    losses = []
    for mb, sizes in enumerate(([3, 2], [0, 0], [0, 4])):
        generator = torch.Generator().manual_seed(mb)
        tokens = torch.randn(sum(sizes), WIDTH, generator=generator).bfloat16().requires_grad_()
        probabilities = torch.rand(sum(sizes), generator=generator)
        output, _ = model(tokens, torch.tensor(sizes), probabilities)
        losses.append(output.float().square().sum() + 0.0 * tokens.float().sum())
    return losses


def whole_layers(case: Case) -> list[tuple[str, str, float]]:
    """Return the layers of the case's GPTModel that are not split: name, class, share."""
    megatron_lab.set_up_parallel_state(case)
    store = split_weight_grad(megatron_lab.build_chunks(case, megatron_lab.make_config(case)))
    return [(layer.name, layer.kind, layer.share) for layer in store.report.whole_layers]


# -- recomputation -----------------------------------------------------------------------------------------------------


def depth_of_recomputation(case: Case) -> int:
    """Return how deep Megatron's recomputations are nested in a step. The check ends the step at a depth of 4."""
    depth, deepest = [0], [0]
    backward = megatron_random.CheckpointFunction.backward

    def counted(ctx: Any, *grads: Any) -> Any:
        depth[0] += 1
        deepest[0] = max(deepest[0], depth[0])
        if depth[0] == 4:
            raise OverflowError("too deep")
        found = backward(ctx, *grads)
        depth[0] -= 1
        return found

    with (
        mock.patch.object(megatron_random.CheckpointFunction, "backward", staticmethod(counted)),
        contextlib.suppress(OverflowError),
    ):
        megatron_lab.Run(case).step(0)
    return deepest[0]
