"""Outputs that something else still needs when they have been sent: an operation of the same graph that saved them, or
a hook that reads them. The numbers are those of one process, and memory that nothing needs comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.integrations.megatron_steps import freed_output
from megatron_pp.runtime.deallocate import accumulate, backward_root, custom_backward
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import (
    HIDDEN,
    TOY_SCHEDULES,
    ToyBlock,
    ToyData,
    ToyResult,
    reference_run,
    toy_loss,
)
from megatron_pp.weight_grad import split_weight_grad
from tests.harness.step_runs import in_pipeline, result_of

DATA = ToyData(5)
SHAPE = (DATA.seq_length, DATA.micro_batch_size, HIDDEN)
Tensor = torch.Tensor


class SquaresInPython(torch.autograd.Function):
    """A node that lives in Python and saves what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def reads_in_hook(h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * torch.cos(h.detach()))
    return h + 1.0


# What a stage makes of h, which it gives as well.
MADE_OF: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda h: h * h,
    "gelu": F.gelu,
    "silu": F.silu,
    "rms_norm": lambda h: F.rms_norm(h, (HIDDEN,)),
    "leaky_relu": F.leaky_relu,
    "log": lambda h: torch.log(h.abs() + 1.0),
    "layer_norm": lambda h: F.layer_norm(h, (HIDDEN,)),
    "custom function": SquaresInPython.apply,
    "tensor hook": reads_in_hook,
    "saves its own output": torch.tanh,
    "view": lambda h: (h * h).view(-1).view(h.shape),
    "the same": lambda h: h,
}


class GivesBoth(torch.nn.Module):
    """Takes one or two tensors, gives h and g(h), or on the last stage their sum; ``flip``: g(h) first."""

    def __init__(self, stage: int, last: bool, kind: str, flip: bool) -> None:
        super().__init__()
        self.block = ToyBlock(stage)
        self.gate = torch.nn.Linear(HIDDEN, HIDDEN)
        with torch.no_grad():
            for parameter in self.gate.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))
        self.last, self.kind, self.flip = last, kind, flip

    def forward(self, given: Any) -> Any:
        h = self.block(given if isinstance(given, Tensor) else given[0] + 0.5 * given[1])
        other = h * torch.sigmoid(self.gate(h)) if self.kind == "gate" else MADE_OF[self.kind](h)
        if self.last:
            return h + other
        return [other, h] if self.flip else [h, other]


def both_alone(size: int, kind: str, flip: bool) -> ToyResult:
    return reference_run(size, DATA, block=lambda stage: GivesBoth(stage, stage == size - 1, kind, flip))


def both_in_threads(size: int, kind: str, flip: bool, wrap: Callable[[Any], Any], **fields: Any) -> ToyResult:
    """One step of ``size`` ranks. ``wrap`` makes of a stage's list what it gives."""
    splits = TOY_SCHEDULES[fields["pipeline_schedule"]].splits_weight

    def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
        x, target = next(data_iterator)
        output = model(x)
        return wrap(output) if isinstance(output, list) else output, lambda output: toy_loss(target, output)

    def converted(stage: PipelineStage) -> PipelineStage:
        if splits:
            split_weight_grad([stage])
        return stage

    shapes = ([SHAPE, SHAPE], [SHAPE, SHAPE])
    reports, modules = in_pipeline(
        *(size, forward_step),
        block=lambda stage: GivesBoth(stage, stage == size - 1, kind, flip),
        wrap=converted,
        data=DATA,
        more={"adjust_tensor_shapes_fn": lambda receive, send: shapes},
        **fields,
    )
    return result_of(reports, modules)


POLICIES = ({"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {}, {"overlap_p2p_comm": True, "p2p_debug": True})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MADE_OF, "gate"])
@settings(max_examples=5, derandomize=True, deadline=None, database=None)
@given(
    size=st.sampled_from([2, 3]),
    flip=st.booleans(),
    wrap=st.sampled_from([list, tuple]),
    schedule=st.sampled_from([name for name, family in TOY_SCHEDULES.items() if family.chunks == 1]),
    policy=st.sampled_from(POLICIES),
)
def test_a_stage_that_gives_what_its_graph_has_saved(
    kind: str, size: int, flip: bool, wrap: Callable[[Any], Any], schedule: str, policy: dict[str, Any]
) -> None:
    result = both_in_threads(size, kind, flip, wrap, pipeline_schedule=schedule, **policy)
    assert result.difference(both_alone(size, kind, flip)) == 0.0


# -- one output, under every schedule ----------------------------------------------------------------------------------


class ReadByHook(ToyBlock):
    """A hook on the output reads it in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        h.register_hook(lambda grad: grad * (1.0 + 0.1 * torch.sin(h.detach())))
        return h


class PassesGradient(torch.autograd.Function):
    """Gives ``x`` and lets ``loss`` into its graph, as the auxiliary losses of experts come in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class WithAuxiliaryLoss(ToyBlock):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return PassesGradient.apply(h, (h * h).mean())


class EndsInTanh(ToyBlock):
    """The operation that makes the output has saved it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


@pytest.mark.slow
@pytest.mark.parametrize("block", [ReadByHook, WithAuxiliaryLoss, EndsInTanh])
@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(
    size=st.sampled_from([2, 3]),
    schedule=st.sampled_from([name for name, family in TOY_SCHEDULES.items() if family.search is None]),
    policy=st.sampled_from(POLICIES),
)
def test_one_output_under_every_schedule(
    block: Callable[[int], Any], size: int, schedule: str, policy: dict[str, Any]
) -> None:
    family = TOY_SCHEDULES[schedule]
    chunks = family.chunks or 2
    result = run_in_threads(
        *(size, chunks, DATA),
        block=block,
        prepare=split_weight_grad if family.splits_weight else None,
        pipeline_schedule=schedule,
        **policy,
    )
    assert result.difference(reference_run(size * chunks, DATA, block=block)) == 0.0


def test_in_overlapped_pairs() -> None:
    for block in (ReadByHook, EndsInTanh):
        result = run_in_threads(
            *(2, 2, DATA), block=block, pipeline_schedule="dualpipe_v", overlapped_forward_backward=in_turn
        )
        assert result.difference(reference_run(4, DATA, block=block)) == 0.0


# -- what is left of an output -----------------------------------------------------------------------------------------


def made(kind: str, x: Tensor) -> Any:
    """An output of each kind, of ``x``."""
    w = torch.full_like(x, 3.0, requires_grad=True)
    return {
        "plain": lambda: x * 3.0 + w,
        "view": lambda: (x * 3.0 + w).view(-1)[2:].view(2, -1),
        "custom function": lambda: SquaresInPython.apply(x + w),
        "second of two": lambda: torch.unbind(torch.stack([x, x * 3.0 + w]))[1],
        "list": lambda: [x * 3.0 + w, (x + w) * 2.0],
    }[kind]()


def tensors(output: Any) -> list[Tensor]:
    return output if isinstance(output, list) else [output]


@pytest.mark.parametrize("keep", [backward_root, freed_output])
@pytest.mark.parametrize("kind", ["plain", "view", "custom function", "second of two", "list"])
def test_memory_that_nothing_needs_comes_back_and_the_graph_stays(kind: str, keep: Callable[[Any], Any]) -> None:
    x = torch.linspace(0.1, 1.0, 10, requires_grad=True)
    output = made(kind, x)
    grads = [torch.linspace(1.0, 2.0, t.numel()).view_as(t) for t in tensors(output)]
    expected = torch.autograd.grad(tensors(output), x, grads, retain_graph=True)[0]
    storages = [StorageWeakRef(t.untyped_storage()) for t in tensors(output)]
    root = keep(output)
    del output
    assert all(storage.expired() for storage in storages)
    if keep is freed_output:
        for freed, grad in zip(tensors(root), grads, strict=True):
            assert freed.requires_grad
            assert freed.untyped_storage().nbytes() == 4
            custom_backward(freed, grad)
    else:
        accumulate(tuple(root) if isinstance(root, list) else (root,), tuple(grads))
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("keep", [backward_root, freed_output])
def test_memory_that_the_graph_has_saved_stays_until_the_backward(keep: Callable[[Any], Any]) -> None:
    x = torch.linspace(0.1, 1.0, 10, requires_grad=True)
    output = x + 1.0
    also = keep(output * output)
    storage = StorageWeakRef(output.untyped_storage())
    root = keep(output)
    del output
    assert not storage.expired()
    for start, grad in ((root, torch.zeros(10)), (also, torch.ones(10))):
        if keep is freed_output:
            custom_backward(start, grad)
        else:
            accumulate((start,), (grad,))
    assert storage.expired()
    assert torch.equal(x.grad, 2 * (x.detach() + 1.0))


def test_what_needs_no_gradient_leaves_nothing() -> None:
    plain = torch.ones(3)
    assert backward_root(plain) is None
    assert backward_root([plain, None]) == [None, None]
    assert not freed_output(plain).requires_grad


def test_what_is_left_stays_what_it_is() -> None:
    output = torch.ones(3, requires_grad=True) * 2
    for keep in (backward_root, freed_output):
        root = keep(output)
        assert keep(root) is root


def test_a_leaf_keeps_its_data() -> None:
    leaf = torch.ones(3, requires_grad=True)
    accumulate((backward_root(leaf),), (torch.full((3,), 2.0),))
    custom_backward(freed_output(leaf), torch.full((3,), 0.5))
    assert torch.equal(leaf.detach(), torch.ones(3))
    assert torch.equal(leaf.grad, torch.full((3,), 2.5))


def test_autograds_threads_get_the_context_variables_that_torchs_own_backward_gives_them() -> None:
    """Compiled graphs read them in the device's thread."""
    seen = []

    class Seeing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(torch._C._is_key_in_tls("context"))
            return grad

    output = Seeing.apply(torch.ones(1, requires_grad=True))
    torch.autograd.backward(output, torch.ones(1), retain_graph=True)
    accumulate((backward_root(output),), (torch.ones(1),))
    assert seen[0] == seen[1]
