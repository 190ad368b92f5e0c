"""The stand-in for Apex's fused weight gradients."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from megatron_pp.tools.parity import cpu_stand_in

APEX = "fused_weight_gradient_mlp_cuda"


def test_autograd_does_not_see_the_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron computes deferred gradients of the embedding after the step, where gradients are enabled. If autograd
    recorded the addition, the buffer of all gradients would require a gradient, and reducing it would raise."""
    monkeypatch.setitem(sys.modules, APEX, None)  # as if it was not installed
    cpu_stand_in._add_fused_gradients()
    kernels = importlib.import_module(APEX)
    buffer = torch.zeros(6)
    inputs = torch.ones(4, 3, requires_grad=True)
    kernels.wgrad_gemm_accum_fp32(inputs, torch.ones(4, 2), buffer.view(2, 3))
    assert torch.equal(buffer, torch.full((6,), 4.0))
    assert not buffer.requires_grad
