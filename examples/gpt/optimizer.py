"""AdamW with warm-up and cosine decay, and its state under parameter names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def learning_rate(step: int, peak: float, final: float, warmup_steps: int, total_steps: int) -> float:
    """The rate of step ``step`` (0-based): a linear rise to ``peak``, then half a cosine to ``final``."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


class NamedAdamW:
    """AdamW over this rank's chunks: torch's, or apex's ``fused_adam``. Matrices are decayed, vectors (norms) are not.

    The state exists from the start, so a checkpoint holds and expects the same tensors at any step.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        fused_adam: Any | None = None,
        fused: bool = False,
    ) -> None:
        self.parameters = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
        self._is_apex = fused_adam is not None
        decayed = [p for p in self.parameters.values() if p.dim() >= 2]
        kept = [p for p in self.parameters.values() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        common = {"lr": 0.0, "betas": betas, "eps": eps}
        self._adamw: Any = None  # a rank may hold no parameter when stages are empty
        if groups and fused_adam is not None:
            self._adamw = fused_adam(groups, adam_w_mode=True, **common)
        elif groups:
            self._adamw = torch.optim.AdamW(groups, fused=fused or None, **common)
        for parameter in self.parameters.values():
            # torch's fused kernel reads its count of steps on the device.
            step = torch.zeros((), device=parameter.device if fused and not self._is_apex else "cpu")
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self._adamw.state[parameter].update(step=step, **moments)

    def step(self, learning_rate: float) -> None:
        """Take one step, then drop the gradients."""
        if self._adamw is None:
            return
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
            if self._is_apex:  # counts steps per group, which checkpoints do not hold
                group["step"] = int(self._adamw.state[group["params"][0]]["step"])
        self._adamw.step()
        for parameter in self.parameters.values():  # apex's zero_grad takes no arguments
            parameter.grad = None
            if self._is_apex:
                self._adamw.state[parameter]["step"] += 1

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer state, the live tensors, by name; for saving, and to be loaded into."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors.update({f"optimizer.{key}.{name}": value for key, value in self._adamw.state[parameter].items()})
        return tensors
