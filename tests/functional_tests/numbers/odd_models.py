"""Stages of unusual models for ``torch_stages.py``, each with a feature that a runtime of stages may get wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

H, SAMPLES = 6, 3
"""Features, and samples of a microbatch."""


class Stage(nn.Module):
    """Stage ``k`` of ``count``: a linear layer and a tanh. The other classes change something of it."""

    def __init__(self, k: int, count: int) -> None:
        super().__init__()
        self.k, self.count = k, count
        self.linear, self.other = nn.Linear(H, H), nn.Linear(H, H)
        self.build()

    @property
    def last(self) -> bool:
        return self.k == self.count - 1

    def build(self) -> None:
        """Make the further parts of a subclass."""

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x)) + x * 0.5


class Reversal(Stage):
    """Reverses the gradient by a hook of an activation."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: -3 * grad)
        return torch.tanh(y)


class Hooks(Stage):
    """Has hooks of modules, of parameters and of the output."""

    def build(self) -> None:
        self.linear.register_full_backward_hook(
            lambda layer, given, made: (2 * given[0],) if given[0] is not None else None
        )
        self.other.register_full_backward_pre_hook(lambda layer, made: (made[0] * 0.5,))
        self.linear.register_forward_hook(lambda layer, given, made: made * 1.5)
        self.other.register_forward_pre_hook(lambda layer, given: (given[0] + 0.1,))
        self.linear.weight.register_hook(lambda grad: 3 * grad)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.other(torch.tanh(self.linear(x))))
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 1.25)
        return y


class Fused(torch.autograd.Function):
    """Accumulates into main_grad, as layers with gradient_accumulation_fusion do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.main_grad += grad.t() @ x
        return grad @ weight, None


class MainGrad(Stage):
    def build(self) -> None:
        self.linear.weight.main_grad = torch.zeros(H, H)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        fused: Any = Fused.apply(x, self.linear.weight)  # type: ignore[no-untyped-call]
        return torch.tanh(fused) + self.other(x)


class Probe(Stage):
    """Trains the last stage on features without gradient."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x.detach() if self.last else x)


class ProbeWithin(Stage):
    """A stage in the middle, or the last of two, cuts the graph; stages before it are not trained."""

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x.detach() if self.k == self.count // 2 else x))


class Beside(Stage):
    """Passes the input on next to the layers that are trained; one use of the input has no gradient."""

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x.detach())


class SharedWeight(Stage):
    """Shares one weight between layers, and calls one layer several times."""

    def build(self) -> None:
        self.tied = nn.Linear(H, H, bias=False)
        self.tied.weight = self.linear.weight

    def forward(self, x: Tensor) -> Any:
        y = self.linear(torch.tanh(self.linear(x))) + self.tied(x)
        return torch.tanh(y)


class ReadBeside(SharedWeight):
    """Has a weight that is also used outside its layers. Autograd adds its gradients in a different order."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + F.linear(x, self.linear.weight.t()) + self.linear.bias


class Views(Stage):
    """Returns views, noncontiguous and expanded tensors, the input itself, and one output twice. In one process the
    next stage gets them in a different layout, and adds their gradients in a different order."""

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        both = torch.cat([torch.tanh(self.linear(x)), self.other(x)], 1)
        left, right = both.chunk(2, 1)
        for one in more:
            right = right + one[0, 0] - one[1, 2]
        if self.last:
            return left + right
        return left, right, right, both.t(), self.linear.bias.expand(SAMPLES, H), x, both[:, ::2]


class InPlace(Stage):
    """Changes outputs in place."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        y[:, 1:3] *= 2
        return y.add_(self.other(x)).relu_()


class Several(Stage):
    """Returns integers, booleans, a mask without gradient, and an output that no stage uses."""

    def forward(self, x: Tensor, order: Any = None, mask: Any = None, scale: Any = None, spare: Any = None) -> Any:
        if self.k == 0:
            order, mask, scale = torch.arange(H).flip(0), x > 0, torch.full((H,), 0.5)
        y = torch.tanh(self.linear(x[:, order])) * scale + x.masked_fill(mask, 0.1)
        return y if self.last else (y, order, mask, scale, self.other(y))


class Frozen(Stage):
    """Has frozen layers, a frozen first stage, and a layer whose bias alone is trained."""

    def build(self) -> None:
        self.other.weight.requires_grad_(False)
        if self.k == 0:
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.other(self.linear(x)))


class BackboneFrozen(Stage):
    """Trains only the last stage."""

    def build(self) -> None:
        self.requires_grad_(self.last)


class Checkpointed(Stage):
    reentrant = False

    def forward(self, x: Tensor) -> Any:
        x = x if x.requires_grad else x.detach().requires_grad_()  # else reentrant checkpointing gives no gradient

        def inner(z: Tensor) -> Tensor:
            return torch.tanh(self.linear(z))

        def outer(z: Tensor) -> Tensor:
            return self.other(checkpoint(inner, z, use_reentrant=self.reentrant))

        return checkpoint(outer, x, use_reentrant=self.reentrant) + x


class Reentrant(Checkpointed):
    reentrant = True


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = op == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Stage):
    def forward(self, x: Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(lambda z: torch.tanh(self.linear(z)), x, use_reentrant=False, context_fn=contexts)


class Sparse(Stage):
    """Has a sparse embedding in each stage, and an embedding whose rows are renormalised."""

    def build(self) -> None:
        self.sparse, self.short = nn.Embedding(8, H, sparse=True), nn.Embedding(8, H, max_norm=0.5)

    def forward(self, x: Tensor) -> Any:
        rows = (x.detach().abs()[:, 0] * 10).long() % 8
        return torch.tanh(self.linear(x)) + self.sparse(rows) + self.short(7 - rows)


class Autocast(Stage):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.other(torch.tanh(self.linear(x)) + self.linear(x))
        return y.float() if self.last or self.k % 2 else y


class Half(Stage):
    """Has bfloat16 parameters, and sends tensors of two dtypes between stages."""

    def build(self) -> None:
        self.other.to(torch.bfloat16)

    def forward(self, x: Tensor, low: Any = None) -> Any:
        low = torch.tanh(self.other(x.bfloat16() if low is None else low))
        y = self.linear(x)
        return y + low.float() if self.last else (y, low)


class OtherLayers(Stage):
    """Has layers without a split form, and a parameter that belongs to no layer."""

    def build(self) -> None:
        self.attention = nn.MultiheadAttention(H, 2, batch_first=True)
        self.recurrent, self.norm = nn.LSTM(H, H, batch_first=True), nn.LayerNorm(H)
        self.convolution, self.scale = nn.Conv1d(SAMPLES, SAMPLES, 3, padding=1), nn.Parameter(torch.ones(H))
        self.bilinear = nn.Bilinear(H, H, H)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x[None])
        y = y + self.attention(y, y, y)[0] + self.recurrent(y)[0]
        y = (y + self.convolution(y))[0] * self.scale
        return torch.tanh(self.bilinear(y, x)) + self.linear(y)


class NoLinear(Stage):
    """Has no layer whose backward can be split."""

    def build(self) -> None:
        del self.linear, self.other
        self.norm, self.shift = nn.LayerNorm(H), nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.norm(x)) + self.shift


class Twins(Stage):
    """Has two parameters with equal gradients, which autograd passes on as one tensor."""

    def build(self) -> None:
        self.one, self.two = nn.Parameter(torch.randn(SAMPLES, H)), nn.Parameter(torch.randn(SAMPLES, H))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x)) + self.one + self.two


class Penalty(Stage):
    """Computes a gradient within the forward and differentiates it again."""

    def forward(self, x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return torch.tanh(self.other(x))
        z = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(torch.tanh(self.linear(z)).square().sum(), z, create_graph=True)
        return torch.tanh(self.other(x)) + 0 * grad.sum() + 0.0 * x + 0.1 * (grad - grad.detach())


class Normed(Stage):
    """Computes weights from other parameters."""

    def build(self) -> None:
        self.linear = nn.utils.parametrizations.weight_norm(self.linear)
        self.other = nn.utils.parametrizations.spectral_norm(self.other)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x)) + self.other(x)


class Functional(Stage):
    """Calls layers with other parameters, and within vmap."""

    def forward(self, x: Tensor) -> Any:
        doubled = {"weight": 2 * self.linear.weight, "bias": self.linear.bias}
        y = torch.func.functional_call(self.linear, doubled, (x,))
        return torch.tanh(y) + torch.func.vmap(self.other)(x)


class Branch(Stage):
    """Has a layer that only some microbatches use."""

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x) if x[0, 0] > 0 else self.other(x))


class Remembers(Stage):
    """Keeps a state: buffers that are assigned and written to, a number, a list, a generator, and a running mean."""

    def build(self) -> None:
        self.register_buffer("ema", torch.ones(H))
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.history, self.spare = 0, [0.0], torch.zeros(H)
        self.draws, self.norm = torch.Generator().manual_seed(self.k), nn.BatchNorm1d(H)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.ema = self.ema * 0.9 + x.mean(0) * 0.1
            self.seen += x.sum()
            self.spare.data.add_(x.detach().sum(0))
            self.other.weight.data.add_(0.01 * x.detach().mean())
            self.history.append(float(x.detach().mean()))
            self.calls += 1
        kept = torch.rand(H, generator=self.draws) > 0.3
        scale = self.ema + self.seen * 0.1 + self.spare * 0.01 + sum(self.history) + self.calls
        return torch.tanh(self.norm(self.linear(x)) * kept * scale) + self.other(x.detach())


class Reused(Stage):
    """Returns the same memory for each microbatch."""

    def build(self) -> None:
        self.register_buffer("memory", torch.zeros(SAMPLES, H))

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        if torch.is_grad_enabled():
            return y
        self.memory.copy_(y)
        return self.memory


class Constant(Stage):
    """Returns a part of a parameter from the last stage."""

    def forward(self, x: Tensor) -> Any:
        return self.linear.bias.expand(SAMPLES, H) if self.last else torch.tanh(self.linear(x))


class Kept(Stage):
    """Has outputs that the program keeps, with their gradients."""

    def build(self) -> None:
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.retain_grad()
            self.kept.append(y)
        return y


class UsedLater(Stage):
    """Returns a second output, which the next stage uses in later steps only."""

    used = False

    def forward(self, x: Tensor, more: Any = None) -> Any:
        y = torch.tanh(self.linear(x))
        if more is not None and self.used:
            y = y + more
        return y if self.last else (y, self.other(x))


class Lazy(Stage):
    def build(self) -> None:
        self.lazy = nn.LazyLinear(H, bias=False)
        self.lazy.initialize_parameters(torch.zeros(1, H))  # else its values would depend on the order of stages
        self.empty = nn.Sequential()

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.lazy(x)) + self.empty(x)


class Layers(Stage):
    """Has layers of several kinds, and a parameter that belongs to no layer, in few operations."""

    def build(self) -> None:
        self.norm, self.convolution = nn.LayerNorm(H), nn.Conv1d(1, 1, 3, padding=1)
        self.shift = nn.Parameter(0.1 * torch.randn(SAMPLES, H))

    def forward(self, x: Tensor) -> Any:
        y = self.norm(torch.tanh(self.linear(x)))
        return x + self.convolution(y.unsqueeze(1)).squeeze(1) + self.shift + self.other(y)


class Nested(Stage):
    """Has blocks that FSDP2 shards one by one, and parameters of the outer module."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Layers(self.k, self.count) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.linear(x)) + self.other(x)


class Compiled(Stage):
    """Has a compiled function within the forward, which no runtime can notice."""

    def forward(self, x: Tensor) -> Any:
        return _compiled_part(self.linear, x) + self.other(x)


def _part(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


_COMPILED: list[Any] = []


def _compiled_part(layer: nn.Module, x: Tensor) -> Any:
    if not _COMPILED:
        with compiling():
            _COMPILED.append(torch.compile(_part, backend="eager"))
    return _COMPILED[0](layer, x)


def compiling() -> Any:
    """Return a context in which torch.compile works; the tests switch it off."""
    return patch.dict(os.environ, TORCHDYNAMO_DISABLE="0")


def unfrozen(step: int, stages: list[Any]) -> None:
    """Unfreeze one stage more in each step, from the last stage on."""
    for stage in stages:
        stage.requires_grad_(stage.k >= stage.count - 1 - step)


def used_later(step: int, stages: list[Any]) -> None:
    for stage in stages:
        stage.used = step > 0


def compiled_in_place(step: int, stages: list[Any]) -> None:
    """Compile stages by ``module.compile()``, which does not change their class."""
    for stage in stages if step == 0 else ():
        with compiling():
            stage.compile(backend="eager")


def frozen_later(step: int, stages: list[Any]) -> None:
    for stage in stages:
        stage.linear.requires_grad_(step == 0 or stage.last)
        stage.other.requires_grad_(step > 0 or stage.last)


def zeroed(step: int, stages: list[Any]) -> None:
    for stage in stages:
        stage.zero_grad()


class Case(NamedTuple):
    kind: Callable[[int, int], nn.Module]
    before: Callable[[int, list[Any]], None] | None = None  # each step: (step, stages)
    compiles: bool = False  # each stage as a whole
    rounds: bool = False  # equal to rounding, not to the last bit


CASES: dict[str, Case] = {
    **{
        kind.__name__: Case(kind)
        for kind in (
            *(Reversal, Hooks, MainGrad, Probe, ProbeWithin, Beside, SharedWeight, InPlace, Several, Frozen),
            *(BackboneFrozen, Checkpointed, Reentrant, Selective, Sparse, Autocast, Half, OtherLayers, NoLinear, Twins),
            *(Penalty, Normed, Functional, Branch, Remembers, Reused, Constant, Kept, Lazy),
        )
    },
    "ReadBeside": Case(ReadBeside, rounds=True),
    "Views": Case(Views, rounds=True),
    "zero_grad in each step": Case(Stage, zeroed),
    "gradual unfreezing": Case(Stage, unfrozen),
    "frozen later": Case(Stage, frozen_later),
    "used later": Case(UsedLater, used_later),
}
PLAIN: dict[str, Case] = {"layers": Case(Layers, zeroed), "nested layers": Case(Nested, zeroed)}
"""Models for rows with wrappers around stages, and for schedules on more ranks."""
COMPILED: dict[str, Case] = {
    "a compiled function": Case(Compiled),
    "compiled stages": Case(Stage, compiles=True),
    "module.compile()": Case(Stage, compiled_in_place),
}
