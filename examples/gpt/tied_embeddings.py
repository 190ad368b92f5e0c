"""The gradient of an embedding that serves twice: at the input of the first stage and at the output of the last."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from examples.gpt.gpt import EMBEDDING, OUTPUT, GPTStage


def is_tied_copy(chunk: GPTStage, name: str) -> bool:
    """Whether parameter ``name`` of ``chunk`` repeats one of the first stage (and must be counted once in norms)."""
    return chunk.share_embeddings_and_output_weights and name == OUTPUT


def sum_tied_gradients(chunks: Sequence[GPTStage], group: dist.ProcessGroup | None) -> None:
    """Add the gradients of the tied embedding's two copies, in place, on whichever ranks hold them.

    To be called once a step on every rank, after the data-parallel reduction. Both copies then take the same
    step of the optimizer and stay equal.

    Args:
        chunks: this rank's chunks, unwrapped.
        group: the ranks of the first and of the last stage; not used where one rank holds both.
    """
    copies = _tied_weights(chunks)
    if len(copies) == 2:
        first, last = copies
        total = _gradient(first) + _gradient(last)
        first.grad, last.grad = total, total.clone()
    elif len(copies) == 1:
        dist.all_reduce(_gradient(copies[0]), group=group)


def _tied_weights(chunks: Sequence[GPTStage]) -> list[nn.Parameter]:
    parameters = {
        name: parameter
        for chunk in chunks
        if chunk.share_embeddings_and_output_weights
        for name, parameter in chunk.named_parameters()
    }
    return [parameters[name] for name in (EMBEDDING, OUTPUT) if name in parameters]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "the tied embedding has no gradient: was there a backward pass?"
    return parameter.grad
