"""Stand-ins for Transformer Engine and apex: modules of their names, in a folder to put on ``sys.path``.

They check what is passed to them against the signatures that the real libraries document, and compute in plain torch.
They show that the right thing is chosen and called as documented, and nothing about the real libraries' arithmetic.
"""

from __future__ import annotations

from pathlib import Path

TRANSFORMER_ENGINE = """
import torch, torch.nn.functional as F
from torch import nn

CALLS = []

class _Queue:
    def __init__(self): self.entries = []
    def qsize(self): return len(self.entries)

class _WeightGradStore:
    def __init__(self, delay): self.context, self.enabled = _Queue() if delay else None, delay
    def delay_wgrad_compute(self): return self.enabled

class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight); ctx.layer = layer
        return x @ weight.t()
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat = lambda t: t.reshape(-1, t.shape[-1])
        if ctx.layer.wgrad_store.enabled:
            ctx.layer.wgrad_store.context.entries.append((weight, flat(grad), flat(x)))
            return grad @ weight, None, None
        return grad @ weight, flat(grad).t() @ flat(x), None

class _Base(nn.Module):
    fuse_wgrad_accumulation = False

    def _setup(self, delay, params_dtype, device):
        assert params_dtype is torch.float32 and isinstance(device, torch.device)
        self.wgrad_store = _WeightGradStore(delay)
    def need_backward_dw(self): return self.wgrad_store.enabled
    def backward_dw(self):
        if not self.wgrad_store.enabled: return
        for _ in range(self._matrices):
            weight, grad, x = self.wgrad_store.context.entries.pop(0)
            weight.grad = grad.t() @ x  # assigns, as the real one does without fused accumulation
    _matrices = 1
    def _note(self, is_first_microbatch):
        CALLS.append((type(self).__name__, is_first_microbatch, FP8[-1] if FP8 else None))

class Linear(_Base):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda",
                 delay_wgrad_compute=False):
        super().__init__(); self._setup(delay_wgrad_compute, params_dtype, device); assert bias is False
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
    def forward(self, inp, is_first_microbatch=None):
        self._note(is_first_microbatch)
        return _Matmul.apply(inp, self.weight, self)

class LayerNormLinear(_Base):
    def __init__(self, in_features, out_features, eps=1e-5, bias=True, params_dtype=None, device="cuda",
                 delay_wgrad_compute=False):
        super().__init__(); self._setup(delay_wgrad_compute, params_dtype, device); assert bias is False
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features))
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
    def forward(self, inp, is_first_microbatch=None):
        self._note(is_first_microbatch)
        x = F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return _Matmul.apply(x, self.weight, self)

class LayerNormMLP(_Base):
    _matrices = 2
    def __init__(self, hidden_size, ffn_hidden_size, eps=1e-5, bias=True, activation="gelu", params_dtype=None,
                 device="cuda", delay_wgrad_compute=False):
        super().__init__(); self._setup(delay_wgrad_compute, params_dtype, device); assert bias is False
        assert activation == "gelu"
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden_size))
        self.layer_norm_bias = nn.Parameter(torch.zeros(hidden_size))
        self.fc1_weight = nn.Parameter(torch.empty(ffn_hidden_size, hidden_size))
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size))
    def forward(self, inp, is_first_microbatch=None):
        self._note(is_first_microbatch)
        x = F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return _Matmul.apply(F.gelu(_Matmul.apply(x, self.fc1_weight, self)), self.fc2_weight, self)

class DotProductAttention(nn.Module):
    def __init__(self, num_attention_heads, kv_channels, attention_dropout=0.0, qkv_format="sbhd",
                 attn_mask_type="causal", layer_number=None):
        super().__init__()
        assert (qkv_format, attn_mask_type) == ("sbhd", "causal") and layer_number >= 1
        self.shape, self.dropout = (num_attention_heads, kv_channels), attention_dropout
    def forward(self, query_layer, key_layer, value_layer):
        for t in (query_layer, key_layer, value_layer):
            assert tuple(t.shape[2:]) == self.shape and t.is_contiguous()
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query_layer, key_layer, value_layer))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)

class LayerNorm(nn.LayerNorm):
    pass

def checkpoint(function, *args, use_reentrant=True):
    assert use_reentrant is False
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

FP8 = []
class autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None):
        self.recipe = recipe
    def __enter__(self): FP8.append(type(self.recipe).__name__ + " " + self.recipe.fp8_format.name)
    def __exit__(self, *_): FP8.pop()

def is_fp8_available(return_reason=False): return (True, "")
def is_fp8_block_scaling_available(return_reason=False): return (False, "needs compute capability 9.0")
"""

RECIPES = """
import enum
from dataclasses import dataclass

class Format(enum.Enum):
    E4M3 = 1
    HYBRID = 2

@dataclass
class DelayedScaling:
    fp8_format: Format = Format.HYBRID

@dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3
"""

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
    "transformer_engine/__init__.py": "__version__ = '2.18.stand-in'",
    "transformer_engine/pytorch/__init__.py": TRANSFORMER_ENGINE,
    "transformer_engine/common/__init__.py": "",
    "transformer_engine/common/recipe/__init__.py": RECIPES,
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": FUSED_ADAM,
    "apex/normalization/__init__.py": FUSED_NORM,
}


def write(folder: Path) -> Path:
    """Put them into ``folder``."""
    for name, text in MODULES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
