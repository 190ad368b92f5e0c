"""Libraries for the training program: Transformer Engine's own layers on the CPU, and stand-ins for apex.

The stand-ins for apex are modules with apex's names, in a folder for ``sys.path``. They check their arguments against
the documented signatures, and compute in plain torch. They show nothing about the real library's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from testkit.stand_ins.transformer_engine_python import on_cpu

FUSED_ADAM = """
import torch

class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0):
        assert adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
    def zero_grad(self): raise AssertionError("takes no arguments, and is not needed")
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), t = group["betas"], group["step"]
            for p in group["params"]:
                state = self.state[p]
                assert len(state) > 0
                p.mul_(1 - group["lr"] * group["weight_decay"])
                m = state["exp_avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
                v = state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                p.addcdiv_(m / (1 - b1**t), (v / (1 - b2**t)).sqrt_().add_(group["eps"]), value=-group["lr"])
"""

FUSED_NORM = """
import torch

class FusedLayerNorm(torch.nn.LayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False):
        super().__init__(normalized_shape, eps=eps)
"""

MODULES = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": FUSED_ADAM,
    "apex/normalization/__init__.py": FUSED_NORM,
    "amp_C.py": "",
    "fused_layer_norm_cuda.py": "",
}


def write(folder: Path) -> Path:
    """Write the stand-in for apex into ``folder``."""
    for name, text in MODULES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


class DotProductAttention(nn.Module):
    """A stand-in: the real layer has no weights, and many kernels."""

    def __init__(
        self, num_attention_heads: int, kv_channels: int, attention_dropout: float, qkv_format: str,
        attn_mask_type: str, layer_number: int,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (qkv_format, attn_mask_type, attention_dropout) == ("sbhd", "causal", 0)
        assert layer_number >= 1
        self.shape = num_attention_heads, kv_channels

    def forward(self, *qkv: Tensor) -> Tensor:
        assert all(tuple(t.shape[2:]) == self.shape and t.is_contiguous() for t in qkv)
        out = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in qkv), is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class Noted:
    """Records the calls of the layers: (kind of layer, is_first_microbatch, FP8 recipe)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool | None, str | None]] = []
        self.fp8: list[str] = []

    @contextmanager
    def autocast(self, enabled: bool, recipe: Any, amax_reduction_group: Any = None) -> Iterator[None]:
        """A stand-in for FP8 regions. The CPU has no FP8 kernels, so layers compute without FP8."""
        assert enabled
        self.fp8.append(f"{type(recipe).__name__} {recipe.fp8_format.name}")
        yield
        self.fp8.pop()

    def wrapped(self, kind: str, forward: Any) -> Any:
        def noting(layer: Any, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
            self.calls.append((kind, is_first_microbatch, self.fp8[-1] if self.fp8 else None))
            return forward(layer, x, is_first_microbatch=is_first_microbatch)

        return noting


def checkpoint(function: Any, *args: Any, use_reentrant: bool) -> Any:
    """A stand-in: the real function saves the state of CUDA's random numbers."""
    assert not use_reentrant
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


@contextmanager
def transformer_engine_for_training() -> Iterator[Noted]:
    """A context with the real layers and norms. Attention, FP8 regions and recomputation are stand-ins."""
    noted = Noted()
    with ExitStack() as stack:
        te = stack.enter_context(on_cpu())
        instead = {"DotProductAttention": DotProductAttention, "autocast": noted.autocast, "checkpoint": checkpoint}
        instead["LayerNorm"] = partial(te.LayerNorm, device="cpu")  # otherwise it queries the GPU's number
        stack.enter_context(mock.patch.multiple(te, **instead))
        for kind in ("Linear", "LayerNormLinear", "LayerNormMLP"):
            layer = getattr(te, kind)
            stack.enter_context(mock.patch.object(layer, "forward", noted.wrapped(kind, layer.forward)))
        yield noted
