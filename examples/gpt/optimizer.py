"""AdamW with warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then half a cosine.

    Attributes:
        peak: rate at the end of the warm-up.
        final: rate at the last step.
        warmup_steps: steps of the warm-up.
        total_steps: steps of the run.
    """

    peak: float
    final: float
    warmup_steps: int
    total_steps: int

    def at(self, step: int) -> float:
        """The rate of step ``step`` (0-based)."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(self.total_steps - 1 - self.warmup_steps, 1)
        return self.final + (self.peak - self.final) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


class Adam(Protocol):
    """A library's AdamW."""

    def make(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        """The optimizer over parameter groups with a ``weight_decay`` each."""
        ...

    def new_step_count(self, parameter: Tensor) -> Tensor:
        """Zero, where this library reads how many steps a parameter has taken."""
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step; the counts of all parameters rise by one."""
        ...


@dataclass(frozen=True)
class TorchAdamW:
    """torch's own. ``fused``: one kernel for many parameters."""

    fused: bool = False

    def make(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=self.fused or None)

    def new_step_count(self, parameter: Tensor) -> Tensor:
        # The fused kernel reads it on the device.
        return torch.zeros((), dtype=torch.float32, device=parameter.device if self.fused else "cpu")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


@dataclass(frozen=True)
class ApexAdamW:
    """``apex.optimizers.FusedAdam``, which counts steps per group of parameters, not per parameter."""

    fused_adam: Any

    def make(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.fused_adam(groups, lr=0.0, betas=betas, eps=eps, adam_w_mode=True)
        return optimizer

    def new_step_count(self, parameter: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.float32)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        states = optimizer.state
        for group in optimizer.param_groups:  # after loading a checkpoint only the parameters know
            group["step"] = int(states[group["params"][0]]["step"])
        optimizer.step()
        for state in states.values():
            state["step"] += 1


class NamedAdamW:
    """A library's AdamW over this rank's chunks, with its state under parameter names.

    The state exists from the start, not from the first step on, so a checkpoint holds and expects the same
    tensors at any step. Matrices are decayed, vectors (norms) are not.

    Args:
        chunks: modules whose parameter names do not clash.
        betas, eps, weight_decay: AdamW's.
        adam: whose AdamW; torch's by default.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam: Adam | None = None,
    ) -> None:
        self._adam: Adam = adam or TorchAdamW()
        self.parameters = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
        decayed = [p for p in self.parameters.values() if p.dim() >= 2]
        kept = [p for p in self.parameters.values() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
        # A rank may hold no matrix, or nothing at all, when stages are empty.
        self._adamw = (
            self._adam.make([group for group in groups if group["params"]], betas, eps) if self.parameters else None
        )
        for parameter in self.parameters.values():
            self._state(parameter).update(
                step=self._adam.new_step_count(parameter),
                exp_avg=torch.zeros_like(parameter),
                exp_avg_sq=torch.zeros_like(parameter),
            )

    def step(self, learning_rate: float) -> None:
        """Take one step, then drop the gradients."""
        if self._adamw is None:
            return
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adam.step(self._adamw)
        for parameter in self.parameters.values():  # apex's zero_grad takes no arguments
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer state, the live tensors, by name; for saving, and to be loaded into."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors.update({f"optimizer.{key}.{name}": value for key, value in self._state(parameter).items()})
        return tensors

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        assert self._adamw is not None
        return self._adamw.state[parameter]
