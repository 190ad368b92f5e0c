"""A stage of the toy model that produces and uses named tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_pp.features.skip_tensors.routes import SkipTensor
from megatron_pp.testing.toy import ToyBlock


class SkipBlock(ToyBlock):
    """A stage that produces and uses the named tensors that ``tensors`` declares."""

    def __init__(self, stage: int, tensors: Sequence[SkipTensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(stage)
        self.uses = [one.name for one in tensors if stage in one.users]
        self.makes = [one for one in tensors if one.source == stage]
        self.factors = torch.nn.Parameter(torch.linspace(0.5, 1.5, max(1, len(self.uses))))
        self.to(dtype)

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        assert list(named) == self.uses
        for weight, tensor in zip(self.factors, named.values(), strict=False):
            x = x + weight * tensor
        output = super().forward(x)
        made = {one.name: (output - x if one.gradient else x.detach().sign()) for one in self.makes}
        return (output, made) if made else output
