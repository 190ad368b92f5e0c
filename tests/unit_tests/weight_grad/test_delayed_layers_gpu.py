"""Transformer Engine's layers as they are, compiled part included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_pp.weight_grad import split_weight_grad


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
    with store.step({0: 2}):
        losses = [delayed(x).pow(2).sum() for x in inputs]
        for mb, loss in enumerate(losses):
            with store.backward(0, mb):
                loss.backward()
        for mb in range(3):
            store.run(0, mb)
    for (name, one), (_, other) in zip(expected.named_parameters(), delayed.named_parameters(), strict=True):
        torch.testing.assert_close(other.main_grad if fuse else other.grad, one.grad, msg=name)
