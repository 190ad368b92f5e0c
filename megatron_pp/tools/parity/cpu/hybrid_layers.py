"""Hybrid models on the CPU. The layers of Transformer Engine in their specifications are replaced by Megatron-core's
plain layers, and Mamba's kernels are written in torch. Part of the CPU stand-in.

| of Transformer Engine              | here                                                         |
| ---------------------------------- | ------------------------------------------------------------ |
| `TELayerNormColumnParallelLinear`  | `ColumnParallelLinear`, and a norm before the layer          |
| `TEColumnParallelLinear`, `TELinear` | `ColumnParallelLinear`                                     |
| `TERowParallelLinear`              | `RowParallelLinear`                                          |
| `TEDotProductAttention`            | `DotProductAttention`                                        |
| `TENorm`                           | `WrappedTorchNorm`                                           |
| grouped experts                    | `SequentialMLP`                                              |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as nn_functions

_STACKS = {
    "megatron.core.models.hybrid.hybrid_layer_specs": "hybrid_stack_spec",
    "megatron.core.models.mamba.mamba_layer_specs": "mamba_stack_spec",
}
_BLOCKS = ("megatron.core.models.hybrid.hybrid_block", "megatron.core.ssm.mamba_block")
_NORMS = {"attention_layer": "input_layernorm", "gdn_layer": "input_layernorm", "mlp_layer": "pre_mlp_layernorm"}
_NORMS |= {"mamba_layer": "norm"}
_MAMBA = "mamba_ssm"


def complete_hybrid_layers() -> None:
    """Puts plain layers into the imported specifications of hybrid stacks."""
    for module, name in _STACKS.items():
        spec = getattr(sys.modules.get(module), name, None)
        if spec is not None:
            _complete(spec)
    for module in _BLOCKS:
        if module in sys.modules:
            vars(sys.modules[module])["TENorm"] = _plain_layers()["TENorm"]  # the norm after the last layer


def _complete(stack: Any) -> None:
    plain = _plain_layers()
    for name in [field.name for field in dataclasses.fields(stack.submodules)]:
        layer = getattr(stack.submodules, name)
        if name == "moe_layer":
            layer.submodules.mlp = _plain_experts()
            layer.submodules.pre_mlp_layernorm = plain["TENorm"]
        elif hasattr(layer, "submodules"):
            fused = _replaced(layer, plain)
            if fused and name in _NORMS:
                setattr(layer.submodules, _NORMS[name], plain["TENorm"])


def _plain_layers() -> dict[str, Any]:
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    column = layers.ColumnParallelLinear
    return {
        **dict.fromkeys(("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TELinear"), column),
        "TERowParallelLinear": layers.RowParallelLinear,
        "TEDotProductAttention": DotProductAttention,
        "TENorm": WrappedTorchNorm,
    }


def _plain_experts() -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    return get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)


def _replaced(spec: Any, plain: dict[str, Any]) -> bool:
    """Replaces Transformer Engine's layers in ``spec``. Returns whether one of them contains a norm."""
    fused = False
    for owner, key, value in _values(spec):
        name = _name_of(value)
        if name in plain:
            fused |= name == "TELayerNormColumnParallelLinear"
            owner[key] = plain[name]
        elif isinstance(value, (list, tuple)):
            found = [_replaced(each, plain) for each in value]
            fused |= any(found)
        elif isinstance(value, functools.partial) or hasattr(value, "submodules") or dataclasses.is_dataclass(value):
            fused |= _replaced(value, plain)
    return fused


def _values(spec: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The values in a specification, as (the dict that has the value, its key, the value)."""
    kept = spec.keywords if isinstance(spec, functools.partial) else getattr(spec, "__dict__", {})
    for key, value in list(kept.items()):
        yield kept, key, value


def _name_of(value: Any) -> str:
    """The name of a layer of Transformer Engine, or of its mock if Transformer Engine is missing."""
    module: Any = sys.modules.get("megatron.core.extensions.transformer_engine")
    for name in ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TELinear", "TERowParallelLinear"):
        if value is getattr(module, name, module):
            return name
    for name in ("TEDotProductAttention", "TENorm"):
        if value is getattr(module, name, module):
            return name
    return ""


@contextlib.contextmanager
def mamba_stand_in() -> Iterator[None]:
    """A context for `import megatron...`: Mamba's layers import kernels of the package mamba_ssm."""
    if importlib.util.find_spec(_MAMBA) is not None:
        yield
        return
    contents: dict[str, dict[str, Any]] = {
        _MAMBA: {"__version__": "2.2.5", "__path__": []},
        f"{_MAMBA}.ops": {"__path__": []},
        f"{_MAMBA}.ops.triton": {"__path__": []},
        f"{_MAMBA}.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
        f"{_MAMBA}.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": _of_inference,
            "mamba_split_conv1d_scan_combined": split_convolved_scan,
        },
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
        vars(module).update(values)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in contents:
            sys.modules.pop(name, None)


def _of_inference(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "mamba_chunk_scan_combined is a kernel of inference; --disable-mamba-mem-eff-path needs it"
    )


class GatedNorm(torch.nn.Module):
    """mamba_ssm's `RMSNorm`, over groups of the last dimension, with a gate."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if z is not None and not self.norm_before_gate:
            x = x * nn_functions.silu(z)
        groups = x.unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        x = groups.flatten(-2) * self.weight
        return x * nn_functions.silu(z) if z is not None and self.norm_before_gate else x


def split_convolved_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    chunk_size: int,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    **options: Any,
) -> torch.Tensor:
    """mamba_ssm's `mamba_split_conv1d_scan_combined`, calculated position by position, with z as the gate. ``zxbcdt``
    has the shape (batch, sequence, sizes of z, x, B, C and dt together). Returns (batch, sequence, heads x head
    size)."""
    heads = len(A)
    size = headdim or D.shape[-1]
    inner = heads * size
    channels = len(conv1d_weight)
    z, convolved, step = zxbcdt.split([inner, channels, heads], dim=-1)
    width = conv1d_weight.shape[-1]
    padded = nn_functions.pad(convolved.transpose(1, 2), (width - 1, 0))
    convolved = nn_functions.silu(
        nn_functions.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=channels).transpose(1, 2)
    )
    states = (channels - inner) // 2
    x, keys, queries = convolved.split([inner, states, states], dim=-1)
    x = x.unflatten(-1, (heads, size))
    keys, queries = (
        each.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for each in (keys, queries)
    )
    step = nn_functions.softplus(step + dt_bias)
    state = x.new_zeros(len(x), heads, size, keys.shape[-1])
    outputs = []
    for position in range(x.shape[1]):
        decay = torch.exp(step[:, position] * A)[..., None, None]
        added = (step[:, position, :, None] * x[:, position])[..., None] * keys[:, position, :, None]
        state = decay * state + added
        outputs.append((state * queries[:, position, :, None]).sum(-1))
    skipped = x * (D if D.dim() == 2 else D[:, None])
    output = (torch.stack(outputs, dim=1) + skipped).flatten(-2)
    return output * nn_functions.silu(z)
