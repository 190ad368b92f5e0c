"""The optimizer's step: gradients are averaged over replicas, summed for tied weights and clipped; AdamW updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from examples.gpt.gpt import EMBEDDING, OUTPUT, OUTPUT_ROWS, GPTStage
from examples.gpt.settings import Settings
from megatron_pp import parallel_state


def finalize_gradients(chunks: Sequence[GPTStage], *_: Any, **__: Any) -> None:
    """``config.finalize_model_grads_func``: first the data-parallel mean, then the tied embedding's sum."""
    gradients = [p.grad for chunk in chunks for p in chunk.parameters() if p.grad is not None]
    group = parallel_state.get_data_parallel_group()
    replicas = dist.get_world_size(group)
    if replicas > 1 and gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])  # one large message instead of many small ones
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            torch.div(total.view_as(gradient), replicas, out=gradient)
    if chunks[0].output_rows:
        sum_tied_rows(chunks[0], parallel_state.get_pipeline_model_parallel_group())
    elif parallel_state.is_rank_in_embedding_group():
        sum_tied_gradients(chunks, parallel_state.get_embedding_group())


def sum_tied_gradients(chunks: Sequence[GPTStage], group: Any) -> None:
    """Add the gradients of a tied embedding's two copies. Two ranks of ``group`` hold them, or this rank holds both."""
    tied = [dict(chunk.named_parameters()) for chunk in chunks if chunk.share_embeddings_and_output_weights]
    copies: list[Any] = [parameters[name] for name in (EMBEDDING, OUTPUT) for parameters in tied if name in parameters]
    if len(copies) == 2:
        total = copies[0].grad + copies[1].grad
        copies[0].grad, copies[1].grad = total, total.clone()
    elif len(copies) == 1:
        dist.all_reduce(copies[0].grad, group=group)


def sum_tied_rows(stage: GPTStage, group: Any) -> None:
    """``sum_tied_gradients`` if every rank of ``group``, the pipeline, holds some rows of the output projection."""
    if not stage.share_embeddings_and_output_weights:
        return
    layer: Any = next(iter(stage.output_rows.values()))
    grad, rows = layer.weight.grad, slice(layer.rows.start, layer.rows.stop)
    total = grad.new_zeros(layer.vocab_size, grad.shape[1])
    total[rows] = grad
    if stage.pre_process:
        total += stage.embedding.weight.grad
    dist.all_reduce(total, group=group)
    grad.copy_(total[rows])
    if stage.pre_process:
        stage.embedding.weight.grad = total


class GradientClipper:
    """Clips by the norm of the whole model's gradient, over all stages. A tied embedding counts once.

    The norm has the same bits however the model is cut: each parameter's own norm goes to a fixed place in one vector,
    which is summed in one fixed order. Construction is collective over ``pipeline_group``."""

    def __init__(self, chunks: Sequence[GPTStage], pipeline_group: Any, max_norm: float) -> None:
        self.max_norm, self.pipeline_group = max_norm, pipeline_group
        self.parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        own = {}
        for chunk in chunks:
            tied = (OUTPUT, OUTPUT_ROWS) if chunk.share_embeddings_and_output_weights else ()
            own.update({name: parameter for name, parameter in chunk.named_parameters() if not name.startswith(tied)})
        everyone: list[Any] = [None] * dist.get_world_size(pipeline_group)
        dist.all_gather_object(everyone, {name: p.numel() for name, p in own.items()}, group=pipeline_group)
        sizes = {name: size for rank in everyone for name, size in rank.items()}
        assert len(sizes) == sum(map(len, everyone)), "two ranks of the pipeline hold the same parameter"
        self.num_parameters, self._squares = sum(sizes.values()), len(sizes)
        self._placed = [(place, own[name]) for place, name in enumerate(sorted(sizes)) if name in own]

    def clip(self) -> Tensor:
        """Scale the gradients in place. Collective over the pipeline. Returns the norm before scaling, an fp64
        scalar."""
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        squares = torch.zeros(self._squares, dtype=torch.float64, device=device)
        for place, parameter in self._placed:
            if parameter.grad is not None:
                squares[place] = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float64) ** 2
        dist.all_reduce(squares, group=self.pipeline_group)
        norm = squares.sum().sqrt()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.max_norm > 0.0 and gradients:
            torch._foreach_mul_(gradients, torch.clamp(self.max_norm / (norm + 1e-6), max=1.0).float())
        return norm


def learning_rate(step: int, settings: Settings) -> float:
    """The learning rate of a step: a linear rise to the peak, then half a cosine. ``step`` counts from 0."""
    peak, final, warmup_steps = settings.learning_rate, settings.min_learning_rate, settings.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(settings.train_steps - 1 - warmup_steps, 1)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


class NamedAdamW:
    """AdamW over this rank's chunks: torch's, or apex's ``fused_adam``. Matrices are decayed, vectors (norms) are not.
    The state exists from the start, so checkpoints of any step have the same tensors."""

    def __init__(self, chunks: Sequence[nn.Module], settings: Settings, fused_adam: Any = None) -> None:
        self.parameters = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
        self._groups: list[dict[str, Any]] = [  # either may be empty, if stages are
            {"params": [p for p in self.parameters.values() if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._eps, self._betas = settings.adam_eps, (settings.adam_beta1, settings.adam_beta2)
        self._fused = fused_adam is None and any(p.is_cuda for p in self.parameters.values())
        self._state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._apex: Any = None
        if fused_adam is not None:
            self._apex = fused_adam(self._groups, lr=0.0, eps=self._eps, betas=self._betas, adam_w_mode=True)
            self._groups, self._state = self._apex.param_groups, self._apex.state
        for parameter in self.parameters.values():
            # torch's fused kernel reads the number of steps on the device.
            step = torch.zeros((), device=parameter.device if self._fused else "cpu")
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self._state[parameter].update(step=step, **moments)

    def step(self, learning_rate: float) -> None:
        """Take one step, then drop the gradients."""
        if self._apex is None:
            for group in self._groups:
                self._update(group, learning_rate)
        else:
            self._step_apex(learning_rate)
        for parameter in self.parameters.values():  # apex's zero_grad takes no arguments
            parameter.grad = None

    @torch.no_grad()
    def _update(self, group: dict[str, Any], learning_rate: float) -> None:
        """Update a group by torch's function ``adamw``. The class AdamW would import torch's compiler, a third of a
        rank's start."""
        with_gradient = [(p, p.grad, self._state[p]) for p in group["params"] if p.grad is not None]
        adamw(
            params=[parameter for parameter, _, _ in with_gradient],
            grads=[gradient for _, gradient, _ in with_gradient],
            exp_avgs=[state["exp_avg"] for _, _, state in with_gradient],
            exp_avg_sqs=[state["exp_avg_sq"] for _, _, state in with_gradient],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for _, _, state in with_gradient],
            fused=self._fused or None,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=learning_rate,
            weight_decay=group["weight_decay"],
            eps=self._eps,
            maximize=False,
        )

    def _step_apex(self, learning_rate: float) -> None:
        for group in self._groups:
            group["lr"] = learning_rate
            if group["params"]:  # apex counts steps per group, and checkpoints have no groups
                group["step"] = int(self._state[group["params"][0]]["step"])
        self._apex.step()
        for parameter in self.parameters.values():
            self._state[parameter]["step"] += 1

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer state by name: the tensors themselves, not copies."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors.update({f"optimizer.{key}.{name}": value for key, value in self._state[parameter].items()})
        return tensors
