"""Runs Megatron in float64: in this process, float32 is replaced by float64."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch


def compute_in_float64() -> None:
    """Replaces float32 by float64. Call it before the script runs. The difference to a run in float32 shows the size of
    rounding."""
    module: Any = torch
    tensor: Any = torch.Tensor
    float32 = torch.float32
    float64 = torch.float64
    module.storage._storage_type_to_dtype_map()  # cached with the real float32, for reading and writing files
    plain_to = tensor.to
    plain_type = tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") is float32:
            kwargs["dtype"] = float64
        return plain_to(self, *(float64 if argument is float32 else argument for argument in args), **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = plain_type(self, *args, **kwargs)
        return name.replace("DoubleTensor", "FloatTensor") if isinstance(name, str) else name

    tensor.to = to
    tensor.type = type_
    tensor.float = tensor.double
    module.float32 = module.float = float64
    module.FloatTensor = torch.DoubleTensor
    torch.set_default_dtype(float64)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        for value in list(vars(sys.modules[name]).values()):
            function = vars(value).get("__init__") if isinstance(value, type) else value
            _replace_default(function, float32, float64)


def _replace_default(function: Any, old: object, new: object) -> None:
    """Replaces a default argument of a function that is already imported."""
    if isinstance(function, FunctionType) and any(value is old for value in function.__defaults__ or ()):
        function.__defaults__ = tuple(new if value is old else value for value in function.__defaults__ or ())
