"""The split form of Megatron-core's tensor-parallel linear layers, with Megatron's arithmetic and communication.

The input gradient is all-reduced or, with sequence parallelism, reduce-scattered over the tensor-parallel group in the
backward; the input is gathered again in W, which all ranks of the group run in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pp.weight_grad.deferred import Deferred
from megatron_pp.weight_grad.linear import DeferredLinear, LinearForm, LinearParameters, gradients_now

_FORM = LinearForm(weight_in_rows=True, flat=True)


@dataclass(frozen=True)
class TensorParallelCall:
    """How Megatron calls the multiplication of a tensor-parallel layer."""

    gradient_accumulation_fusion: bool
    allreduce_dgrad: bool
    sequence_parallel: bool
    tp_group: Any

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> TensorParallelCall | None:
        """None where Megatron defers this layer's weight gradient itself."""
        if keywords.get("grad_output_buffer") is not None:
            return None
        return cls(
            bool(keywords.get("gradient_accumulation_fusion")),
            bool(keywords.get("allreduce_dgrad")),
            bool(keywords.get("sequence_parallel")),
            keywords.get("tp_group"),
        )


@dataclass(slots=True)
class DeferredTensorParallelLinear(Deferred):
    """Of one call; its input is this rank's part of a split sequence."""

    layer: LinearParameters
    call: TensorParallelCall

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        return self.gathered().compute()

    def gathered(self) -> DeferredLinear:
        whole = _gathered(self.layer_input, self.call.tp_group) if self.call.sequence_parallel else self.layer_input
        return DeferredLinear(self.layer, whole.flatten(0, -2), self.grad_output.flatten(0, -2), _FORM)


class _SplitTensorParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer_input: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LinearParameters,
        call: TensorParallelCall,
    ) -> Tensor:
        ctx.layer, ctx.call = layer, call
        ctx.save_for_backward(layer_input, weight)
        whole = _gathered(layer_input, call.tp_group) if call.sequence_parallel else layer_input
        output = torch.matmul(whole, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, weight = ctx.saved_tensors
        call: TensorParallelCall = ctx.call
        grad_input = grad_output.matmul(weight) if ctx.needs_input_grad[0] else None
        pending = None
        if grad_input is not None and call.sequence_parallel:
            whole, grad_input = grad_input, torch.empty_like(layer_input)
            pending = dist.reduce_scatter_tensor(grad_input, whole.contiguous(), group=call.tp_group, async_op=True)
        elif grad_input is not None and call.allreduce_dgrad:
            pending = dist.all_reduce(grad_input, group=call.tp_group, async_op=True)
        layer, current = ctx.layer, ctx.layer.store.running()
        deferred = DeferredTensorParallelLinear(layer, layer_input.detach(), grad_output, call)
        weight_grad = bias_grad = None
        if current is not None and current.puts_off(layer.weight):
            layer.store.leave(deferred)
        else:
            weight_grad, bias_grad = gradients_now(deferred.gathered(), fused=current is not None)
        if pending is not None:
            pending.wait()
        return grad_input, None, weight_grad, bias_grad, None, None


def split_tensor_parallel_linear(
    layer_input: Tensor, layer: LinearParameters, call: TensorParallelCall, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """What Megatron's ``_forward_impl`` computes: [sequence, batch, in / tp or in] -> [sequence, batch, out or out /
    tp]. ``weight`` and ``bias`` are the leaves of the layer's.
    """
    return _SplitTensorParallelLinear.apply(layer_input, layer.store.anchor, weight, bias, layer, call)


def _gathered(part: Tensor, group: Any) -> Tensor:
    """The whole sequence of what is split over ``group`` along the first dimension."""
    whole = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole
