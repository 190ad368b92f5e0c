"""The split form of Megatron-core's tensor-parallel linear layers, with Megatron's arithmetic and communication.

The input gradient is all-reduced or, with sequence parallelism, reduce-scattered over the tensor-parallel group in the
backward. The input is gathered again in W, which all ranks of the group run in the same order, while the weight
gradient before it is computed; where a backward is whole, while the input gradient is computed, as in Megatron.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pp.weight_grad.deferred import SplitLayer
from megatron_pp.weight_grad.linear import DeferredLinear, Gathering


class SplitTensorParallelLinear(torch.autograd.Function):
    """What Megatron's ``_forward_impl`` computes: [sequence, batch, in / tp or in] -> [sequence, batch, out or out /
    tp], of an expert [tokens, in] -> [tokens, out]. ``weight`` and ``bias`` are the leaves of the layer's.
    """

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, _: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLayer, *call: Any
    ) -> Tensor:
        """``call``: Megatron's allreduce_dgrad, sequence_parallel and tp_group."""
        ctx.layer, ctx.call = layer, call
        ctx.save_for_backward(layer_input, weight)
        sequence_parallel, group = call[1:]
        whole = Gathering(layer_input, group).wait() if sequence_parallel else layer_input
        output = torch.matmul(whole, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, weight = ctx.saved_tensors
        allreduce_dgrad, sequence_parallel, group = ctx.call
        flat_input, flat_grad = layer_input.detach().flatten(0, -2), grad_output.flatten(0, -2)
        deferred = DeferredLinear(ctx.layer, flat_input, flat_grad, group=group if sequence_parallel else None)
        if sequence_parallel and not deferred.is_put_off():
            deferred.prepare()
        grad_input = grad_output.matmul(weight) if ctx.needs_input_grad[0] else None
        pending = None
        if grad_input is not None and sequence_parallel:
            whole, grad_input = grad_input, torch.empty_like(layer_input)
            pending = dist.reduce_scatter_tensor(grad_input, whole.contiguous(), group=group, async_op=True)
        elif grad_input is not None and allreduce_dgrad:
            pending = dist.all_reduce(grad_input, group=group, async_op=True)
        grads = deferred.leave_or_compute()
        if pending is not None:
            pending.wait()
        return grad_input, None, *grads, *[None] * 4
