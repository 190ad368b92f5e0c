"""A parameter leaf replaces a parameter in autograd's graph during a pipeline step; its gradient goes to the store.

The leaf shares the parameter's data, version counter and attributes. Each parameter has one leaf in a step, so that
autograd adds up a parameter's gradients in the leaf as it does in the parameter.

DistributedDataParallel, Megatron's main_grad and optimizers in backward put hooks on a parameter's AccumulateGrad node.
In a pipeline step these hooks fire once per parameter, with its last gradient. Earlier gradients are added by the same
addition, without hooks.
"""

from collections.abc import Callable
from functools import cache, partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge


def add_silently(parameter: Tensor, grad: Tensor) -> None:
    """Add ``grad`` to ``main_grad`` or ``.grad``. Tensor hooks run and may change the gradient; accumulation hooks do
    not run. Nothing else may hold ``grad``, because it may become ``.grad`` itself."""
    add_hooked(parameter, through_tensor_hooks(parameter, grad))


def add_hooked(parameter: Tensor, grad: Tensor) -> None:
    """``add_silently`` for a gradient on which the tensor hooks have already run, such as one that ``autograd.grad``
    returned."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(grad)
        return
    grad = in_its_dtype(parameter, grad)
    if parameter.grad is None:
        like = grad.is_sparse or grad.stride() == parameter.stride()
        parameter.grad = grad if like else torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
    else:
        parameter.grad.add_(grad)


def gradient_dtype(parameter: Tensor) -> torch.dtype | None:
    """The dtype to which autograd casts a parameter's gradients before it adds them up; None: it casts none. FSDP2 sets
    a wider one under mixed precision, from torch 2.15 on."""
    return getattr(parameter, "grad_dtype", parameter.dtype)


def in_its_dtype(parameter: Tensor, grad: Tensor) -> Tensor:
    """The gradient as autograd adds it to the others of ``parameter``."""
    dtype = gradient_dtype(parameter)
    return grad if dtype is None or grad.dtype == dtype else grad.to(dtype)


def add_and_fire(parameter: Tensor, grad: Tensor | None) -> None:
    """Add the last gradient of a step (None if all are already added) and fire every accumulation hook once. With a
    ``main_grad``, hooks get Megatron's signal ``grad_added_to_main_grad`` and a zero gradient. Afterwards the signal is
    what it was: Megatron resets it only together with the gradients, and would drop those of a backward outside of the
    step."""
    frozen = not parameter.requires_grad  # frozen since its backward: autograd would call no hook
    has_main_grad = getattr(parameter, "main_grad", None) is not None
    if grad is not None and (frozen or has_main_grad):
        add_silently(parameter, grad)
    if frozen:
        return
    if grad is not None and not has_main_grad:
        torch.autograd.backward([parameter], [in_its_dtype(parameter, grad)])
        return
    if not has_main_grad:
        _fire_with_zeros(parameter)
        return
    had_grad = parameter.grad is not None
    was_added = getattr(parameter, "grad_added_to_main_grad", False)
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    _fire_with_zeros(parameter)
    parameter.grad_added_to_main_grad = was_added  # type: ignore[attr-defined]
    if not had_grad:
        parameter.grad = None


def _fire_with_zeros(parameter: Tensor) -> None:
    """Fire accumulation hooks without a gradient. Tensor hooks, which have run on every gradient, do not run again."""
    hooks: dict[int, Any] = parameter._backward_hooks or {}
    aside = dict(hooks)
    hooks.clear()
    try:
        zeros = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        torch.autograd.backward([parameter], [zeros])
    finally:
        hooks.update(aside)


def through_tensor_hooks(parameter: Tensor, grad: Tensor) -> Tensor:
    """The gradient after the hooks of ``parameter.register_hook``."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


_BEHIND = "_leaf_parameter"
_ASSIGNED = "_leaf_assignments"
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


def new_leaf(parameter: Tensor, arrived: Callable[[Tensor, Tensor], None]) -> Tensor:
    """A leaf of ``parameter``; calls ``arrived(parameter, leaf)`` when a backward has finished the leaf's gradient."""
    leaf: Tensor
    plain = type(parameter).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if isinstance(parameter, nn.Parameter) and plain:
        leaf = torch.Tensor._make_subclass(_leaf_class(type(parameter)), parameter, True)
        leaf.__dict__ = parameter.__dict__
    else:  # a subclass with its own dispatch: only its detach() can copy it
        leaf = parameter.detach().requires_grad_()
        leaf.__dict__.update(parameter.__dict__)
    if (dtype := gradient_dtype(parameter)) != leaf.dtype:
        leaf.grad_dtype = dtype
    setattr(leaf, _BEHIND, parameter)
    if parameter._backward_hooks:
        torch.Tensor.register_hook(leaf, partial(_when_asked_for, get_gradient_edge(leaf).node, parameter))
    torch.Tensor.register_post_accumulate_grad_hook(leaf, partial(arrived, parameter))
    return leaf


def accumulates(leaf: Node) -> bool:
    """Whether the running backward accumulates in the leaf of this node. ``autograd.grad`` does not accumulate."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # autograd.grad was called for this leaf
        return False


def _when_asked_for(leaf: Node, parameter: Tensor, grad: Tensor) -> Tensor:
    """The tensor hook of a leaf. It runs the parameter's hooks on gradients of ``autograd.grad``, as autograd does."""
    return grad if accumulates(leaf) else through_tensor_hooks(parameter, grad)


def parameter_behind(tensor: Tensor) -> Tensor:
    """The parameter that ``tensor`` is a leaf of, or ``tensor`` itself."""
    return getattr(tensor, _BEHIND, tensor)


def take_gradient(leaf: Tensor) -> Tensor | None:
    """Take the gradient that autograd has accumulated in the leaf. The leaf has none afterwards."""
    grad: Tensor | None = _GRAD.__get__(leaf)
    if grad is not None:
        _GRAD.__set__(leaf, None)
    return grad


def is_dummy_grad(parameter: Tensor) -> bool:
    """Whether autograd's gradient of ``parameter`` is memory of any content, to be dropped: a layer's own fused
    backward has added the gradient to ``main_grad`` and has set Megatron's signal. With ``zero_out_wgrad`` such a
    backward gives autograd zeros, which are added to gradients of other layers."""
    if not getattr(parameter, "grad_added_to_main_grad", False):
        return False
    return not getattr(parameter, "zero_out_wgrad", False)


def follow(leaf: Tensor, parameter: Tensor) -> None:
    """Give the leaf the parameter's data, after an assignment of ``parameter.data``."""
    if isinstance(leaf, nn.Parameter):
        _assign_data(leaf, parameter.data)


def assignments(tensor: Tensor) -> int:
    """How often ``data`` of a leaf was assigned (version counters do not count this); 0 for other tensors."""
    return getattr(tensor, _ASSIGNED, 0)


@cache
def _leaf_class(original: Any) -> Any:
    """The class of a leaf, which forwards these attributes to the parameter."""
    methods = ("__deepcopy__", "__reduce_ex__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook")
    attributes = {
        "__slots__": (_BEHIND, _ASSIGNED),
        "__module__": original.__module__,
        "data": property(lambda leaf: parameter_behind(leaf).data, _assign_data),
        "grad": property(
            lambda leaf: parameter_behind(leaf).grad, lambda leaf, new: setattr(parameter_behind(leaf), "grad", new)
        ),
        **{name: partialmethod(_call_behind, name) for name in methods},
    }
    return type(original)(original.__name__, (original,), attributes)


def _call_behind(leaf: Tensor, method: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(parameter_behind(leaf), method)(*args, **kwargs)


def _assign_data(leaf: Tensor, data: Tensor) -> None:
    parameter_behind(leaf).data = data
    _DATA.__set__(leaf, data)
    setattr(leaf, _ASSIGNED, assignments(leaf) + 1)
