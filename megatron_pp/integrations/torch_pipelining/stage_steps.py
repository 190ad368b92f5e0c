"""One microbatch through one of this rank's stages: forward with the loss, and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from megatron_pp.integrations.torch_pipelining.autograd_split import AutogradSplit
from megatron_pp.integrations.torch_pipelining.batch import Batch
from megatron_pp.integrations.torch_pipelining.hops import Edge, Hop, checked_hop
from megatron_pp.integrations.torch_pipelining.stage_calls import StageCall
from megatron_pp.runtime.compute import LossRecord
from megatron_pp.runtime.deallocate import backward_root, run_backward


@dataclass
class StageSteps:
    """``record.data`` are the losses, ``outputs`` those of the last stage, both in the order of its forwards.

    calls    of this rank's stages, by chunk
    edges    of all stages but the last
    loss_fn  None: no loss is computed
    split    where backwards are split by autograd's graph"""

    calls: Sequence[StageCall]
    edges: Sequence[Edge]
    batch: Batch
    loss_fn: Callable[..., Any] | None
    split: AutogradSplit | None
    keeps_outputs: bool
    shapes_vary: bool
    record: LossRecord = field(default_factory=LossRecord)
    outputs: list[Any] = field(default_factory=list)

    def forward(self, chunk: int, mb: int, input_tensor: Hop | None) -> Any:
        call, batch = self.calls[chunk], self.batch
        given = batch.args[mb] if input_tensor is None else input_tensor.tensors
        output = call(given, batch.kwargs[mb])
        if not call.is_last:
            return checked_hop(output, self.edges[call.index], call.index, mb, self.shapes_vary)
        if self.keeps_outputs:
            self.outputs.append(tree_map_only(Tensor, Tensor.detach, output))
        if self.loss_fn is None or batch.targets is None:
            return None
        loss = self.loss_fn(output, batch.targets[mb], **batch.loss_kwargs)
        self.record.data.append(loss.detach())
        return loss

    def backward(
        self, chunk: int, mb: int, input_tensor: Hop | None, output: Any, output_grad: Hop | None
    ) -> Hop | None:
        """Gradients of what came to the stage: zeros where it has made none, as another rank may wait for them."""
        inputs = [] if input_tensor is None else input_tensor.tensors
        roots, grads = _starts(output, output_grad)
        if self.split is not None:
            found = self.split.run_backward(roots, grads, inputs)
        else:
            if roots:
                run_backward(roots, grads)
            found = [tensor.grad for tensor in inputs]
        if input_tensor is None:
            return None
        return Hop(
            [
                torch.zeros_like(tensor) if grad is None and tensor.requires_grad else grad
                for tensor, grad in zip(inputs, found, strict=True)
            ]
        )

    def backward_root(self, output: Hop) -> Hop:
        return Hop([backward_root(tensor) for tensor in output.tensors])


def _starts(output: Any, output_grad: Hop | None) -> tuple[list[Any], list[Tensor | None]]:
    """The roots of a backward, and their gradients: the loss, or the outputs to which gradients came back."""
    if not isinstance(output, Hop):
        return ([output], [None]) if output is not None and output.requires_grad else ([], [])
    assert output_grad is not None
    pairs = [
        (root, grad)
        for root, grad in zip(output.tensors, output_grad.tensors, strict=True)
        if grad is not None and (isinstance(root, GradientEdge) or (root is not None and root.requires_grad))
    ]
    return [root for root, _ in pairs], [grad for _, grad in pairs]
