"""Chooses the library of each part of training: torch, NVIDIA apex, or Transformer Engine (with FP8 if it is set).

If a chosen library is missing, that is an error. ``auto`` uses the fused form on a GPU if it is installed. The module
is written for the documented interfaces of apex and of Transformer Engine 1.13 to 2.20. Neither has been run on a GPU.
Transformer Engine's layers start with the same weights as the local layers, bit for bit. Their GELU is the tanh
approximation.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt.errors import ArgumentError
from examples.gpt.gpt import LayerParts, RotaryEmbedding, dropped
from examples.gpt.settings import Settings

TE = "transformer_engine"
_RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
# Compiled modules that these need. apex can be installed without them, and then fails at the first call.
_COMPILED = {"apex.optimizers": "amp_C", "apex.normalization": "fused_layer_norm_cuda"}
_INSTALL = {
    "apex": "build it from NVIDIA's source with its CUDA extensions (apex on PyPI is a different project)",
    TE: "install transformer_engine[pytorch]",
}


def choose_libraries(settings: Settings, device: torch.device, split: bool) -> tuple[LayerParts, Any, tuple[str, str]]:
    """The parts of layers, apex's optimizer or None, and two lines that describe them. ``split``: whether the schedule
    has weight-gradient operations. Raises ArgumentError if a chosen library cannot be used."""
    on_gpu = device.type == "cuda"
    fused_adam = _find("--optimizer-impl", settings.optimizer_impl, "apex.optimizers", "FusedAdam", on_gpu)
    optimizer = "apex FusedAdam" if fused_adam else f"torch AdamW (fused={on_gpu})"
    if settings.transformer_impl == TE:
        parts, layers = _transformer_engine(settings, device, split)
    elif settings.fp8 is not None:
        raise ArgumentError(f"--fp8 is {settings.fp8}, which needs --transformer-impl {TE}")
    else:
        norm = _find("--norm-impl", settings.norm_impl, "apex.normalization", "FusedLayerNorm", on_gpu)
        parts = LayerParts(norm or nn.LayerNorm)
        layers = f"layers: torch; norms: {'apex FusedLayerNorm' if norm else 'torch LayerNorm'}"
    return parts, fused_adam, (layers, f"optimizer: {optimizer}")


def _transformer_engine(settings: Settings, device: torch.device, split: bool) -> tuple[LayerParts, str]:
    flag, on_gpu = "--transformer-impl", device.type == "cuda"
    if settings.norm_impl != "auto":
        raise ArgumentError(f"--norm-impl is {settings.norm_impl}, but {flag} {TE} has its own norms; leave one out")
    if settings.model.sequence_slices > 1:
        raise ArgumentError(f"{flag} {TE} keeps no keys and values for --sequence-slices; leave one out")
    te, recipe, precision = _required(flag, f"{TE}.pytorch", on_gpu), None, "no FP8"
    if settings.fp8 is not None:
        recipes = _required(flag, f"{TE}.common.recipe", on_gpu)
        known = [name for name, kind in _RECIPES.items() if hasattr(recipes, kind)]
        if settings.fp8_recipe not in known:
            lacks = f"which this release of Transformer Engine does not have; it has {', '.join(known)}"
            raise ArgumentError(f"--fp8-recipe is {settings.fp8_recipe}, {lacks}")
        kind = getattr(recipes, _RECIPES[settings.fp8_recipe])
        recipe = kind(fp8_format=getattr(recipes.Format, settings.fp8.upper()))
        precision = f"FP8 {settings.fp8}, {settings.fp8_recipe} scaling"
    version = getattr(importlib.import_module(TE), "__version__", "of unknown version")
    return TransformerEngineParts(te, device, split, recipe), f"layers: Transformer Engine {version} ({precision})"


def _find(flag: str, wanted: str, module: str, name: str, on_gpu: bool) -> Any | None:
    """``module.name`` of apex if it is chosen, or with ``auto`` if it is installed. None otherwise."""
    try:
        return None if wanted == "torch" else getattr(_required(flag, module, on_gpu), name)
    except (ArgumentError, AttributeError):
        if wanted != "auto":
            raise
    return None


def _required(flag: str, module: str, on_gpu: bool) -> Any:
    library = module.partition(".")[0]
    if not on_gpu:
        raise ArgumentError(f"{flag} is {library}, which computes only on GPUs; leave {flag} out")
    try:
        importlib.import_module(_COMPILED.get(module, module))
        return importlib.import_module(module)
    except Exception as error:  # an incomplete extension may raise any error
        advice = f"{_INSTALL[library]}, or leave {flag} out"
        raise ArgumentError(f"{flag} is {library}, but {module} cannot be imported ({error}); {advice}") from error


class TransformerEngineBlock(nn.Module):
    """One pre-norm transformer layer of four fused modules. With FP8, the first microbatch of a step makes FP8 copies
    of the weights, which the other microbatches use."""

    def __init__(self, te: Any, config: Any, layer: int, device: torch.device, split: bool, fp8: bool) -> None:
        super().__init__()
        hidden, epsilon, self.num_heads = config.hidden_size, config.layernorm_epsilon, config.num_attention_heads
        common: dict[str, Any] = {"bias": False, "params_dtype": torch.float32, "device": device}
        if split:  # older releases do not have the keyword
            common["delay_wgrad_compute"] = True
        self.qkv = te.LayerNormLinear(hidden, 3 * hidden, eps=epsilon, **common)
        kind: dict[str, Any] = {"qkv_format": "sbhd", "attn_mask_type": "causal", "layer_number": layer + 1}
        kind["attention_dropout"] = config.attention_dropout
        self.core_attention = te.DotProductAttention(self.num_heads, hidden // self.num_heads, **kind)
        self.proj = te.Linear(hidden, hidden, **common)
        self.feed_forward = te.LayerNormMLP(hidden, config.ffn_hidden_size, eps=epsilon, activation="gelu", **common)
        self.hidden_dropout = config.hidden_dropout
        self.fp8, self.is_first_microbatch = fp8, True

    def forward(self, x: Tensor, rotary: RotaryEmbedding, part: None = None) -> Tensor:
        first = self.is_first_microbatch if self.fp8 else None  # None: nothing is kept between microbatches
        x = x + dropped(self, self._attention(x, rotary, first)).to(x.dtype)
        x = x + dropped(self, self.feed_forward(x, is_first_microbatch=first)).to(x.dtype)
        self.is_first_microbatch = False
        return x

    def _attention(self, x: Tensor, rotary: RotaryEmbedding, first: bool | None) -> Tensor:
        s, b, h = x.shape
        qkv = self.qkv(x, is_first_microbatch=first).view(s, b, 3, self.num_heads, h // self.num_heads)
        query, key, value = qkv.unbind(2)  # each [s, b, heads, head_dim]
        # To [b, heads, s, head_dim] and back.
        query, key = (rotary(part.permute(1, 2, 0, 3)).permute(2, 0, 1, 3).contiguous() for part in (query, key))
        context = self.core_attention(query, key, value.contiguous())
        return self.proj(context.reshape(s, b, h), is_first_microbatch=first)


class TransformerEngineParts(LayerParts):
    """LayerParts made of ``te``, the module transformer_engine.pytorch. ``split``: leave weight gradients to
    ``backward_dw()``. ``recipe``: that of FP8, or None. FP8's largest values are reduced over the replicas."""

    def __init__(self, te: Any, device: torch.device, split: bool, recipe: Any = None) -> None:
        super().__init__(te.LayerNorm)
        self.te, self.device, self.split, self.recipe = te, device, split, recipe

    def block(self, config: Any, layer: int) -> nn.Module:
        return TransformerEngineBlock(self.te, config, layer, self.device, self.split, fp8=self.recipe is not None)

    def forward_context(self) -> AbstractContextManager[Any]:
        """One FP8 region for each microbatch. At its end the largest values are reduced."""
        if self.recipe is None:
            return nullcontext()
        if hasattr(self.te, "autocast"):  # the name since 2.9
            return self.te.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.replicas)
        return self.te.fp8_autocast(enabled=True, fp8_recipe=self.recipe, fp8_group=self.replicas)

    def checkpointed(self, block: nn.Module, *inputs: Any) -> Tensor:
        """``block(*inputs)`` by Transformer Engine's checkpointing. torch's would recompute with another FP8 scale."""
        return self.te.checkpoint(block, *inputs, use_reentrant=False)
