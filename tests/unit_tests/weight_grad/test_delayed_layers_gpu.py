"""Transformer Engine's layers as they are, compiled part included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_pp.weight_grad import split_weight_grad
from tests.unit_tests.weight_grad.steps import run_split


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
