"""Why a value cannot be sent between stages."""

from typing import Any

import torch

from megatron_pp.errors import P2PTypeError


def error_of(
    value: Any, declared: torch.dtype | None, pipeline_dtype: torch.dtype | None, device: torch.device
) -> P2PTypeError:
    """The error for a ``value`` that is no plain tensor of the ``declared`` dtype (by default ``pipeline_dtype``) on
    ``device``."""
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
