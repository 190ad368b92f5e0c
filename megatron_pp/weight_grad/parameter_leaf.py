"""A tap: a parameter as a layer sees it during a pipeline step. Its gradient goes to the store, not to the parameter.

A tap is a leaf of autograd's graph that shares the parameter's data, version counter and attributes. There is one per
parameter and step, so that autograd adds up a parameter's gradients in the tap as it does in the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from megatron_pp.weight_grad.delivery import through_tensor_hooks

_BEHIND = "_tapped_parameter"
_ASSIGNED = "_tap_assignments"
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
gradient_of: Callable[[Tensor], Tensor | None] = _GRAD.__get__  # what autograd has accumulated in a tap


def new_tap(parameter: Tensor, arrived: Callable[[Tensor, Tensor], None]) -> Tensor:
    """A tap of ``parameter``. ``arrived(parameter, tap)`` is called whenever one backward has finished the tap's gradient."""
    tap: Tensor
    if isinstance(parameter, nn.Parameter) and _is_plain(type(parameter)):
        tap = torch.Tensor._make_subclass(_tap_class(type(parameter)), parameter, True)
        tap.__dict__ = parameter.__dict__
    else:  # only its own detach() knows how to copy it
        tap = parameter.detach().requires_grad_()
        tap.__dict__.update(parameter.__dict__)
    setattr(tap, _BEHIND, parameter)
    if parameter._backward_hooks:
        torch.Tensor.register_hook(tap, partial(_when_asked_for, get_gradient_edge(tap).node, parameter))
    torch.Tensor.register_post_accumulate_grad_hook(tap, partial(arrived, parameter))
    return tap


def accumulates(leaf: Node) -> bool:
    """Whether the running backward accumulates in a leaf, which is given by its node: ``autograd.grad`` does not."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # it is what autograd.grad was asked for
        return False


def _when_asked_for(leaf: Node, parameter: Tensor, grad: Tensor) -> Tensor:
    """A tap's tensor hook: the parameter's hooks see what ``autograd.grad`` computes, as well as what is delivered."""
    return grad if accumulates(leaf) else through_tensor_hooks(parameter, grad)


def parameter_behind(tensor: Tensor) -> Tensor:
    """The parameter that ``tensor`` is a tap of, or ``tensor`` itself."""
    return getattr(tensor, _BEHIND, tensor)


def clear_gradient(tap: Tensor) -> None:
    """Drop what autograd has accumulated in the tap."""
    _GRAD.__set__(tap, None)


def follow(tap: Tensor, parameter: Tensor) -> None:
    """Give the tap the parameter's data where somebody has assigned ``parameter.data``."""
    if isinstance(tap, nn.Parameter):
        _assign_data(tap, parameter.data)


def assignments(tensor: Tensor) -> int:
    """How often the data of a tap was assigned, which its version counter does not count; 0 for other tensors."""
    return getattr(tensor, _ASSIGNED, 0)


def _is_plain(kind: type) -> bool:
    """Whether a class of parameters does not change what operations do."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


@cache
def _tap_class(original: Any) -> Any:
    """What is asked of the parameter rather than of the tap."""
    attributes = {
        "__slots__": (_BEHIND, _ASSIGNED),
        "__module__": original.__module__,
        "__deepcopy__": lambda tap, memo: parameter_behind(tap).__deepcopy__(memo),
        "__reduce_ex__": lambda tap, protocol: parameter_behind(tap).__reduce_ex__(protocol),
        "data": property(lambda tap: parameter_behind(tap).data, _assign_data),
        "grad": property(lambda tap: parameter_behind(tap).grad, _assign_grad),
        "requires_grad_": lambda tap, requires_grad=True: parameter_behind(tap).requires_grad_(requires_grad),
        "register_hook": lambda tap, hook: parameter_behind(tap).register_hook(hook),
        "register_post_accumulate_grad_hook": lambda tap, hook: parameter_behind(
            tap
        ).register_post_accumulate_grad_hook(hook),
    }
    return type(original)(original.__name__, (original,), attributes)


def _assign_data(tap: Tensor, data: Tensor) -> None:
    parameter_behind(tap).data = data
    _DATA.__set__(tap, data)
    setattr(tap, _ASSIGNED, assignments(tap) + 1)


def _assign_grad(tap: Tensor, grad: Tensor | None) -> None:
    parameter_behind(tap).grad = grad
