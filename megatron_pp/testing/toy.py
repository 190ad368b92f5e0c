"""A small model in stages, and its run in one process: the reference for losses and gradients, to the last bit."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.runtime.stage import PipelineStage

if TYPE_CHECKING:
    from megatron_pp.features.slices.sequence_slice import SequenceSlice

HIDDEN = 4
TOY_SCHEDULES = {name: family for name, family in SCHEDULES.items() if not family.barriers}
"""The schedules that leave the output layer to the last stage, as the toy model does."""


class ToyBlock(torch.nn.Module):
    """One stage: a linear layer, tanh, a scale and a residual. Weights depend on the stage number alone."""

    def __init__(self, stage: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1000 + stage)
        self.linear = torch.nn.Linear(hidden, hidden)
        self.scale = torch.nn.Parameter(torch.ones(hidden))
        with torch.no_grad():
            for parameter in (self.linear.weight, self.linear.bias, self.scale):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale + x


@dataclass(frozen=True)
class ToyData:
    """Inputs and targets of M microbatches, [sequence, microbatch, hidden], float32. With ``variable``, sequence
    lengths differ. ``first`` is the number of the first microbatch, from which contents are generated."""

    num_microbatches: int
    seq_length: int = 3
    micro_batch_size: int = 2
    variable: bool = False
    hidden: int = HIDDEN
    first: int = 0

    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(7 + self.first + mb)
        length = self.seq_length + (mb % 3 if self.variable else 0)
        shape = (length, self.micro_batch_size, self.hidden)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def iterator(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self.microbatch(mb) for mb in range(self.num_microbatches))


def toy_loss(target: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (output - target).pow(2).mean()
    return loss, {"loss": loss.detach().clone()}


def current_slice() -> SequenceSlice | None:
    """The slice of a sequence that this thread computes, None without slices. Steps without slices do not load that
    feature."""
    slices = sys.modules.get("megatron_pp.features.slices.sequence_slice")
    return None if slices is None else slices.sequence_slice()


def toy_forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A ``forward_step_func`` over ``ToyData``. Every chunk reads each microbatch, and takes its slice of it."""
    x, target = next(data_iterator)
    if (part := current_slice()) is not None:
        x, target = part.of(x, 0), part.of(target, 0)
    return model(x), lambda output: toy_loss(target, output)


@dataclass
class ToyResult:
    """Losses in microbatch order, and the gradient of every parameter by "stage.name"."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)

    def difference(self, other: ToyResult) -> float:
        """The largest absolute difference of any loss or gradient; infinite if keys differ or a value is not finite."""
        if len(self.losses) != len(other.losses) or self.grads.keys() != other.grads.keys():
            return float("inf")
        differences = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        differences += [float((grad - other.grads[name]).abs().max()) for name, grad in self.grads.items()]
        # max() would drop a NaN: no comparison with one is true.
        return max(differences, default=0.0) if all(map(math.isfinite, differences)) else float("inf")


def toy_config(**fields: Any) -> SimpleNamespace:
    """A config with Megatron's field names. Fields that are not given have the engine's defaults."""
    return SimpleNamespace(**{"pipeline_dtype": torch.float32, "hidden_size": HIDDEN, "p2p_timeout": 30.0, **fields})


def reference_run(
    num_stages: int, data: ToyData, forward_only: bool = False, block: Callable[[int], torch.nn.Module] = ToyBlock
) -> ToyResult:
    """The result of the model without a pipeline, microbatches one after the other."""
    stages = [block(stage) for stage in range(num_stages)]
    result = ToyResult()
    with torch.set_grad_enabled(not forward_only):
        for x, target in data.iterator():
            named: dict[str, torch.Tensor] = {}
            for stage in stages:
                x = stage(x, **{name: named[name] for name in getattr(stage, "uses", ())})
                if isinstance(x, tuple):
                    x, made = x
                    named |= made
            loss, report = toy_loss(target, x)
            result.losses.append(float(report["loss"]))
            if not forward_only:
                (loss / data.num_microbatches).backward()
    result.grads = gradients_of(dict(enumerate(stages)))
    return result


def toy_chunks(
    placement: Placement, rank: int, config: Any, block: Callable[[int], torch.nn.Module] = ToyBlock
) -> list[PipelineStage]:
    return [
        PipelineStage(block(stage), config, chunk, stage=stage) for chunk, stage in enumerate(placement.stages[rank])
    ]


def gradients_of(stages: dict[int, Any]) -> dict[str, torch.Tensor]:
    """ "stage.name" -> gradient, for parameters that have one. ``stages``: stage number -> module."""
    return {
        f"{stage}.{name.removeprefix('inner.')}": parameter.grad
        for stage, module in stages.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def merged(results: Sequence[ToyResult]) -> ToyResult:
    """One result from the results of all ranks."""
    return ToyResult(
        losses=[loss for result in results for loss in result.losses],
        grads={name: grad for result in results for name, grad in result.grads.items()},
    )
