"""Megatron-core's layers over Transformer Engine, set to delay weight gradients. The Python of both libraries is
unchanged and runs on the CPU.

Megatron's config refuses ``delay_wgrad_compute`` for them, without which their ``backward_dw`` does nothing.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from testkit.processes import run_processes
from testkit.stand_ins.transformer_engine_python import on_cpu
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = [needs_megatron, pytest.mark.slow]
MICROBATCHES, WIDTH = 3, 8


def _new_model(fuse: bool, bias: bool) -> Any:
    import torch

    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    config = importlib.import_module("megatron.core.transformer").TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, num_moe_experts=2, use_cpu_initialization=True,
        gradient_accumulation_fusion=fuse, add_bias_linear=bias,
    )  # fmt: skip
    common = {"config": config, "init_method": torch.nn.init.normal_, "bias": bias, "skip_bias_add": False}
    up = engine.TELayerNormColumnParallelLinear(WIDTH, 2 * WIDTH, gather_output=False, is_expert=False, **common)
    down = engine.TERowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True, is_expert=False, **common)
    experts = engine.TEColumnParallelGroupedLinear(2, WIDTH, WIDTH, is_expert=True, **common)
    model = torch.nn.ModuleList([up, down, experts])
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if fuse:
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return model


def _losses(model: Any) -> list[Any]:
    import torch

    losses = []
    for mb in range(MICROBATCHES):
        x = torch.randn(5, 1, WIDTH, generator=torch.Generator().manual_seed(mb))
        x, _ = model[0](x)
        x, _ = model[1](x.tanh())
        x, _ = model[2](x.view(5, WIDTH), [[2, 3], [5, 0], [1, 4]][mb])
        losses.append(x.square().sum())
    return losses


def _differences(rank: int, size: int) -> dict[str, list[float]]:
    """Return per form each gradient's largest difference from that of unchanged layers, and the largest gradient."""
    from megatron_pp.weight_grad import split_weight_grad

    warnings.simplefilter("ignore")
    found = {}
    with on_cpu():
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
        for fuse, bias in ((False, False), (False, True), (True, False), (True, True)):
            expected, model = _new_model(fuse, bias), _new_model(fuse, bias)
            for loss in _losses(expected):
                loss.backward()
            store = split_weight_grad(model)
            assert (store.report.switched, store.report.whole) == (3, 0), store.report
            with store.step({0: MICROBATCHES - 1}):
                for mb, loss in enumerate(_losses(model)):
                    with store.backward(0, mb):
                        loss.backward()
                assert model[0].weight.grad is None
                for mb in range(MICROBATCHES):
                    store.run(0, mb)
            for (name, parameter), its_own in zip(expected.named_parameters(), model.parameters(), strict=True):
                grad = parameter.main_grad if fuse and parameter.dim() > 1 else parameter.grad
                got = its_own.main_grad if fuse else its_own.grad
                found[f"{name} {fuse=} {bias=}"] = [float((got - grad).abs().max()), float(grad.abs().max())]
    return found


def test_gradients_of_megatrons_layers_are_those_without_delay() -> None:
    (found,) = run_processes(_differences, 1, timeout=120, start_method="forkserver")
    assert len(found) == 2 * (6 + 10)
    assert {name: difference for name, (difference, _) in found.items() if difference} == {}
    assert min(size for _, size in found.values()) > 0
