"""Small models, each with one habit that models have: of how they use, change, share or replace their weights."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

WIDTH, MICROBATCHES = 6, 3
VOCAB, WIDE = 11, 8


class Habit(nn.Module):
    """Two linear layers with a norm between them; what a model does besides is its subclass's."""

    dtype = torch.float32
    inputs_need_gradients = True
    hooked = True
    exact = True  # else equal but for rounding
    exact_under_autocast = True

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.norm(self.one(x))))

    def batch(self, mb: int) -> Tensor:
        return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(mb)).to(self.dtype)


class MaxNormByData(Habit):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.norm):
            layer.weight.data = layer.weight.data * 0.75
        return super().forward(x)


class MaxNormOfAllParameters(Habit):
    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():  # not those that the layers' attributes give
            parameter.data = parameter.data * 0.75
        return super().forward(x)


class MaxNormConvolution(Habit):
    class _Layer(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.convolution = self._Layer(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.convolution(x))


class ConstraintUnderNoGrad(Habit):
    """Allowed where no input gradient needs the weight: in the first layer of the first stage."""

    inputs_need_gradients = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.one.weight.clamp_(-0.2, 0.2).mul_(0.9)
        return super().forward(x)


class ConstraintThatAutogradRefuses(Habit):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.two.weight.mul_(0.9)
        return super().forward(x)


class InPlaceOnALeaf(Habit):
    def forward(self, x: Tensor) -> Tensor:
        self.norm.weight.mul_(0.9)
        return super().forward(x)


class InPlaceOnOutputs(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(torch.arange(3))
        embedded += F.relu(self.one(x).mean(0), inplace=True)
        return self.two(F.silu(self.one(embedded + x), inplace=True))


class Double(Habit):
    dtype = torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.double()


class Twice(Habit):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(torch.tanh(self.one(self.two(torch.tanh(self.one(x))))))


class TwiceAndItsWeight(Habit):
    exact_under_autocast = False  # autocast has a cast for each of the two uses

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.one(x)), self.one.weight)


class NormTwice(Habit):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.two(self.norm(self.one(x))))


class Tied(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.two.weight = self.one.weight
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x + self.embedding(torch.arange(3))))


class Parametrized(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.parametrizations.spectral_norm(self.one)
        self.two = nn.utils.parametrizations.weight_norm(self.two)


class FunctionalCall(Habit):
    """``named_parameters()`` gives the parameters themselves, so that part of their gradient comes in B."""

    hooked = exact = False

    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: p * 0.5 for name, p in self.one.named_parameters()}
        return super().forward(torch.func.functional_call(self.one, scaled, (x,)))


class FunctionalCallOfNewLeaves(Habit):
    exact_under_autocast = False

    def forward(self, x: Tensor) -> Tensor:
        new = {"weight": self.two.weight.detach().clone().requires_grad_()}
        return super().forward(torch.func.functional_call(self.two, new, (x,)))


class FunctionalCallOfItsOwn(Habit):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.func.functional_call(self.two, dict(self.two.named_parameters()), (x,)))


class Forces(Habit):
    """A gradient of the output is a part of the output."""

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.pow(2).sum(), x, create_graph=True)
        return energy + force


class ForcesOfFlatInput(Forces):
    def batch(self, mb: int) -> Tensor:
        return super().batch(mb)[0]


class Saliency(Habit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        y = self.two(torch.tanh(hidden))
        (how_much,) = torch.autograd.grad(y.sum(), hidden, retain_graph=True)
        return y * how_much.abs()


class FunctionalCallAlone(Habit):
    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: p * 0.5 for name, p in self.one.named_parameters()}
        return self.two(self.norm(torch.func.functional_call(self.one, scaled, (x,))))


class DataOfTheLast(Habit):
    """Data assigned when the layers' last forward of a step is over."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            for layer in (self.one, self.norm):
                layer.weight.data = layer.weight.data * 0.75
        return y


class GradientOfTheWeight(Habit):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        grads = torch.autograd.grad(y.pow(2).mean(), (self.one.weight, self.two.bias), create_graph=True)
        return y + sum(g.pow(2).sum() for g in grads)


class CheckpointedForces(Forces):
    exact = False

    def forward(self, x: Tensor) -> Tensor:
        return self.two(checkpoint(super().forward, x, use_reentrant=False))


class Vmap(Habit):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)


class FuncGrad(Habit):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.func.grad(lambda y: self.two(self.norm(y)).pow(2).sum())(x)


class ForwardMode(Habit):
    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            y, tangent = forward_ad.unpack_dual(super().forward(forward_ad.make_dual(x, torch.ones_like(x))))
            return y + tangent


class Jvp(Habit):
    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.func.jvp(super().forward, (x,), (torch.ones_like(x),)))


class _Checkpointed(Habit):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        part = super().forward
        y = checkpoint(part, x, use_reentrant=self.reentrant)
        return self.two(checkpoint(part, y, use_reentrant=self.reentrant))


class CheckpointedReentrant(_Checkpointed):
    reentrant = True
    exact_under_autocast = False  # in which order its three backwards of a weight end is autocast's cache's business


class Transposed(Habit):
    """Inputs and weights that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.one.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.three = nn.Linear(3, 5)
        self.four = nn.Linear(4, 7, bias=False)
        self.tokens = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(self.two(self.one(x.transpose(0, 1))))[..., :WIDTH]
        y = self.four(self.three(self.two(y).permute(1, 2, 0).transpose(1, 2).transpose(0, 2)).permute(1, 2, 0))
        return self.two(y[0, :, :WIDTH].t()[:, :5].t()).sum(0).expand(3, WIDTH)


class Flat(Habit):
    """Matrices, also transposed ones, vectors, four dimensions, and a batch of none."""

    exact_under_autocast = False  # vectors are autograd's, with a cast of their own

    def batch(self, mb: int) -> Tensor:
        return torch.randn(WIDTH, 9, generator=torch.Generator().manual_seed(mb))

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x.t()))
        return y + self.one(y[0]) + self.two(y[None, None])[0, 0] + self.two(y[:0]).sum()


class Frozen(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.one.weight.requires_grad_(False)
        self.two.bias.requires_grad_(False)


class ChangedInput(Habit):
    """A frozen layer's input may be changed in place: nothing needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.two.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x) * 1.0
        y = self.two(hidden)
        hidden.mul_(2)
        return y + hidden


class FrozenNowAndThen(Habit):
    hooked = False

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.one.weight.requires_grad_(self.calls % 2 == 1)
        self.norm.weight.requires_grad_(requires_grad=self.calls % 2 == 1)
        return super().forward(x)


class Replaced(Habit):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.two.bias = nn.Parameter(self.two.bias.detach().clone())
        return y


class Unused(Habit):
    """A layer whose output has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return _FirstOnly.apply(self.one(x), self.two(x))


class _FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
        return one + two

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Attributes(Habit):
    """What a model may do with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.one.weight
        assert isinstance(weight, nn.Parameter)
        assert weight.is_leaf
        assert weight is self.one.weight
        assert isinstance(copy.deepcopy(weight), nn.Parameter)
        assert type(copy.deepcopy(self.one)) is nn.Linear
        weight.seen = getattr(weight, "seen", 0) + 1  # type: ignore[attr-defined]
        return super().forward(x) * weight.seen  # type: ignore[attr-defined]


class SparseEmbedding(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.embedding(torch.arange(3)))


class Complex(Habit):
    dtype = torch.complex64

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.two(self.one(x))).sum(-1)


class ChannelsLast(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        wide = x[..., None].expand(4, 3, WIDTH, 2)
        return super().forward(self.convolution(wide)[..., 0].repeat(1, 1, 2)[..., :WIDTH])


class _Square(torch.autograd.Function):
    """A custom autograd function with a parameter of its own: x * w^2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w * w, (2 * grad * x * w).sum((0, 1))


class _Custom(abc.ABC, nn.Module):  # an abstract base: its class has another layout
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(x, self.weight)


class Everything(Habit):
    """Tied embedding and head, norms, attention that uses its child's weight, a convolution, a custom function, a bare
    parameter, a frozen layer, a layer used twice, and one with a parametrized weight.
    """

    inputs_need_gradients = False
    exact_under_autocast = False

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(VOCAB, WIDE, padding_idx=0)
        self.up = nn.Linear(WIDE, 2 * WIDE)
        self.norm = nn.LayerNorm(2 * WIDE)
        self.down = nn.Linear(2 * WIDE, WIDE, bias=False)
        self.attention = nn.MultiheadAttention(WIDE, 2)
        self.scale = nn.Parameter(torch.ones(WIDE))
        self.convolution = nn.Conv1d(WIDE, WIDE, 3, padding=1)
        self.custom = _Custom()
        self.frozen = nn.Linear(WIDE, WIDE).requires_grad_(False)
        self.bias_only = nn.Linear(WIDE, WIDE)
        self.bias_only.weight.requires_grad_(False)
        self.twice = nn.Linear(WIDE, WIDE)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDE, WIDE))
        self.head = nn.Linear(WIDE, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.norm(self.up(x)))) * self.scale
        x = x + self.attention(x, x, x)[0]
        x = x + self.convolution(x.permute(1, 2, 0)).permute(2, 0, 1)
        x = self.bias_only(self.frozen(self.custom(x)))
        x = x + self.twice(torch.tanh(self.twice(x)))
        return self.head(self.normed(x))

    def batch(self, mb: int) -> Tensor:
        return torch.randint(0, VOCAB, (5, 2), generator=torch.Generator().manual_seed(mb))


def _subclasses(kind: type[Habit]) -> Iterator[type[Habit]]:
    for each in kind.__subclasses__():
        if not each.__name__.startswith("_"):
            yield each
        yield from _subclasses(each)


HABITS = [Habit, *_subclasses(Habit)]
