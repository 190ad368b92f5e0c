"""What is left of an output that has been sent: memory that nothing needs comes back, what the graph has saved stays.

``test_several_tensors.py`` and ``test_differential.py`` have the numbers of stages whose outputs something still needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.integrations.megatron.steps.forward_backward import freed_output
from megatron_pp.runtime.engine.compute import accumulate
from megatron_pp.runtime.engine.deallocate import backward_root
from megatron_pp.runtime.engine.swapped_outputs import custom_backward
from testkit.models.blocks import SquaresInPython

every_way = pytest.mark.parametrize("keep", [backward_root, freed_output])


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


def backward_of(root: Any, *grads: Tensor) -> None:
    """From what is left of an output, in one way or the other."""
    if isinstance(tensors(root)[0], Tensor):
        for freed, grad in zip(tensors(root), grads, strict=True):
            custom_backward(freed, grad)
    else:
        accumulate(tuple(tensors(root)), grads)


def tensors(output: Any) -> list[Tensor]:
    return output if isinstance(output, list) else [output]


@every_way
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
        assert all(freed.requires_grad and freed.untyped_storage().nbytes() == 4 for freed in tensors(root))
    backward_of(root, *grads)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@every_way
def test_memory_that_the_graph_has_saved_stays_until_the_backward(keep: Callable[[Any], Any]) -> None:
    x = torch.linspace(0.1, 1.0, 10, requires_grad=True)
    output = x + 1.0
    also = keep(output * output)
    storage = StorageWeakRef(output.untyped_storage())
    root = keep(output)
    del output
    assert not storage.expired()
    for start, grad in ((root, torch.zeros(10)), (also, torch.ones(10))):
        backward_of(start, grad)
    assert storage.expired()
    assert torch.equal(x.grad, 2 * (x.detach() + 1.0))


def test_outputs_without_a_gradient_leave_no_graph_root() -> None:
    plain = torch.ones(3)
    assert backward_root(plain) is None
    assert backward_root([plain, None]) == [None, None]
    assert not freed_output(plain).requires_grad


def test_freeing_an_output_twice_changes_nothing() -> None:
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
