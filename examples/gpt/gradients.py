"""What happens to gradients between the backward passes and the optimizer: averaging, tying, clipping."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.gpt.gpt import GPTStage
from examples.gpt.grid import GridMember
from examples.gpt.tied_embeddings import is_tied_copy, sum_tied_gradients


class GradientFinalizer:
    """Megatron's ``finalize_model_grads_func`` for GPT stages in a pipeline x data grid.

    Order as in Megatron: the data-parallel reduction first, the tied embedding's sum after it.

    Args:
        chunks: this rank's chunks, unwrapped.
        grid: the groups of replicas and of the tied embedding; under a per-token loss also the pipeline's, in which the
            last stage alone knows the number of tokens.
    """

    def __init__(self, chunks: Sequence[GPTStage], grid: GridMember) -> None:
        self.chunks = chunks
        self.grid = grid

    def __call__(self, model: Any, num_tokens: Tensor | None = None, **_: Any) -> None:
        """Finish the gradients of one step, in place.

        Args:
            model: what the schedule was given; not used, the chunks are known.
            num_tokens: under ``calculate_per_token_loss``, the tokens of this replica (int, one element, right on the
                last stage): gradients are summed over replicas and divided by the tokens of all. Otherwise ``None``:
                gradients are averaged over replicas.
        """
        gradients = [p.grad for chunk in self.chunks for p in chunk.parameters() if p.grad is not None]
        divisor: Tensor | int = dist.get_world_size(self.grid.data_group)
        if num_tokens is not None:
            dist.broadcast(num_tokens, src=self.grid.last_stage_rank, group=self.grid.pipeline_group)
            dist.all_reduce(num_tokens, group=self.grid.data_group)
            divisor = num_tokens.clamp(min=1)
        _reduce_over_replicas(gradients, self.grid.data_group, divisor)
        sum_tied_gradients(self.chunks, self.grid.embedding_group)


def _reduce_over_replicas(gradients: Sequence[Tensor], group: dist.ProcessGroup | None, divisor: Tensor | int) -> None:
    if dist.get_world_size(group) > 1 and gradients:
        # One large message instead of many small ones.
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, reduced in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(reduced.view_as(gradient))
    if gradients and (isinstance(divisor, Tensor) or divisor > 1):
        torch._foreach_div_(list(gradients), divisor)


class GradientClipper:
    """Clips by the norm of the whole model's gradient, over all stages; a tied embedding counts once.

    The norm has the same bits however the model is cut: each parameter's own norm goes to a fixed place in one
    vector, the vectors are added (each place is written by one rank, so nothing rounds), and the vector is summed
    in one fixed order.

    Construction is collective over ``pipeline_group``.

    Args:
        chunks: this rank's chunks, unwrapped.
        pipeline_group: the ranks that together hold the model.
        max_norm: the gradient is scaled down to this norm; 0 leaves it as it is.

    Raises:
        RuntimeError: a parameter lies on two ranks.
    """

    def __init__(self, chunks: Sequence[GPTStage], pipeline_group: dist.ProcessGroup | None, max_norm: float) -> None:
        self.max_norm = max_norm
        self.pipeline_group = pipeline_group
        self.parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        counted = _counted_parameters(chunks)
        everyone: list[Any] = [None] * dist.get_world_size(pipeline_group)
        dist.all_gather_object(everyone, sorted(counted), group=pipeline_group)
        places = places_of(everyone)
        self._num_places = len(places)
        self._placed = [(places[name], parameter) for name, parameter in counted.items()]

    def clip(self) -> Tensor:
        """Scale the gradients in place. Collective over the pipeline.

        Returns:
            The norm before clipping, fp64, no dimension; the same on every rank of the pipeline.
        """
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        squares = torch.zeros(self._num_places, dtype=torch.float64, device=device)
        for place, parameter in self._placed:
            if parameter.grad is not None:
                squares[place] = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float64) ** 2
        dist.all_reduce(squares, group=self.pipeline_group)
        norm = squares.sum().sqrt()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.max_norm > 0.0 and gradients:
            factor = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0).float()
            torch._foreach_mul_(gradients, factor)
        return norm


def places_of(names_of_ranks: Sequence[Sequence[str]]) -> dict[str, int]:
    """A place for every parameter of the model, the same on all ranks. Raises RuntimeError if two ranks hold one."""
    names = sorted(name for names in names_of_ranks for name in names)
    twice = sorted({name for name, next_name in itertools.pairwise(names) if name == next_name})
    if twice:
        raise RuntimeError(f"two ranks of the pipeline hold the same parameter: {', '.join(twice)}")
    return {name: place for place, name in enumerate(names)}


def _counted_parameters(chunks: Sequence[GPTStage]) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if not is_tied_copy(chunk, name)
    }
