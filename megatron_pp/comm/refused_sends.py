"""Whether a value can be sent between stages, and why one cannot."""

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_pp.errors import P2PTypeError


def check_sendable(
    value: Any, declared: torch.dtype | None, pipeline_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Raises P2PTypeError unless ``value`` is a plain tensor of the ``declared`` dtype (by default ``pipeline_dtype``)
    on ``device``."""
    is_sendable = (
        isinstance(value, torch.Tensor)
        and value.dtype is (declared or pipeline_dtype)
        and value.device == device
        and value.layout is torch.strided
        and not value.is_nested
        and (value.__class__ is torch.Tensor or not is_traceable_wrapper_subclass(value))
    )
    if not is_sendable:
        raise _error_of(value, declared, pipeline_dtype, device)


def _error_of(
    value: Any, declared: torch.dtype | None, pipeline_dtype: torch.dtype | None, device: torch.device
) -> P2PTypeError:
    if not isinstance(value, torch.Tensor):
        return P2PTypeError(
            f"a {type(value).__name__} cannot be sent between stages; it must be a tensor or a list of tensors"
        )
    if value.dtype != (declared or pipeline_dtype):
        said = f"config.pipeline_dtype is {pipeline_dtype}" if declared is None else f"it is declared as {declared}"
        return P2PTypeError(
            f"a tensor of {value.dtype} cannot be sent between stages: {said}, and the receiver expects that"
        )
    if value.device != device:
        return P2PTypeError(
            f"a tensor on {value.device} cannot be sent between stages: this communicator's tensors lie on {device}"
        )
    return P2PTypeError(
        f"a {'nested ' * value.is_nested}{type(value).__name__} of layout {value.layout} cannot be sent "
        "between stages: it is not one block of memory; give a dense tensor (to_dense(), DTensor.to_local())"
    )
