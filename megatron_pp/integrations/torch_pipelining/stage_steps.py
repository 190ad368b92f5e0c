"""One microbatch through one of this rank's stages: forward with the loss, and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.torch_pipelining.batch import Batch
from megatron_pp.integrations.torch_pipelining.hops import Edge, Hop, checked_hop
from megatron_pp.integrations.torch_pipelining.last_outputs import LastOutputs
from megatron_pp.integrations.torch_pipelining.stage_calls import StageCall
from megatron_pp.runtime.engine.compute import LossRecord, run_backward
from megatron_pp.runtime.engine.deallocate import backward_root
from megatron_pp.runtime.engine.model_steps import check_loss


@dataclass
class StageSteps:
    """Runs microbatches. ``record.data`` has the losses, in the order of the forwards.

    calls    the calls of this rank's stages, by chunk
    edges    the edges behind all stages but the last
    loss_fn  None: no loss is computed
    outputs  takes the outputs of the last stage; None if the caller does not want them"""

    calls: Sequence[StageCall]
    edges: Sequence[Edge]
    batch: Batch
    loss_fn: Callable[..., Any] | None
    outputs: LastOutputs | None
    trains: bool
    shapes_vary: bool
    record: LossRecord = field(default_factory=LossRecord)

    def __post_init__(self) -> None:
        self._kept: list[set[int] | None] = [None] * len(self.calls)  # for each chunk ``_memory_of`` its module
        self._sharded = [any(isinstance(one, FSDPModule) for one in call.stage.submod.modules()) for call in self.calls]

    def forward(self, chunk: int, mb: int, input_tensor: Hop | None) -> Any:
        call = self.calls[chunk]
        batch = self.batch
        given = batch.args[mb] if input_tensor is None else input_tensor.tensors
        output = call(given, batch.kwargs[mb])
        if not call.is_last:
            edge = self.edges[call.index]
            hop = checked_hop(output, edge, call.index, mb, self.trains, self.shapes_vary)
            hop.tensors = list(map(self._of_its_own(chunk), hop.tensors))
            return hop
        if self.outputs is not None:
            self.outputs.add(tree_map_only(Tensor, self._of_its_own(chunk), output))
        if self.loss_fn is None or batch.targets is None:
            return None
        loss = self.loss_fn(output, batch.targets[mb], **batch.loss_kwargs)
        if not isinstance(loss, Tensor):
            raise ScheduleInputError(
                f"the loss function returned a {type(loss).__name__}; it must return the loss of a microbatch, a "
                "tensor of one element. What else it computes it may keep in an object of the program"
            )
        check_loss(loss, self.trains)
        self.record.data.append(loss.detach())
        return loss

    def _of_its_own(self, chunk: int) -> Callable[[Tensor], Tensor]:
        """A function that copies a tensor if its memory is the module's, and returns any other as it is. The next
        forward may write to the module's memory while it is sent, and whole parameters are freed when they are sharded
        again."""
        kept = self._kept[chunk]
        module = self.calls[chunk].stage.submod
        if kept is None:
            kept = self._kept[chunk] = _memory_of(module)
        if self._sharded[chunk]:
            kept = kept | {_memory(parameter) for parameter in module.parameters()} - {0}
        return lambda tensor: tensor.clone() if _memory(tensor) in kept else tensor

    def backward(
        self, chunk: int, mb: int, input_tensor: Hop | None, output: Any, output_grad: Hop | None
    ) -> Hop | None:
        """The gradients of the stage's inputs: zeros for inputs without one, because another rank waits for them."""
        inputs = [] if input_tensor is None else input_tensor.tensors
        roots, grads = self._starts(self.calls[chunk], output, output_grad)
        if roots:
            run_backward(roots, grads)
        if input_tensor is None:
            return None
        return Hop(
            [
                torch.zeros_like(tensor) if tensor.grad is None and tensor.requires_grad else tensor.grad
                for tensor in inputs
            ]
        )

    def _starts(self, call: StageCall, output: Any, output_grad: Hop | None) -> tuple[list[Any], list[Tensor | None]]:
        """The roots of a backward, and their gradients: the loss, or the outputs to which gradients came back."""
        if call.is_last:
            return ([output], [None]) if output is not None else ([], [])
        assert output_grad is not None
        roots = []
        grads = []
        for root, grad, meta in zip(output.tensors, output_grad.tensors, self.edges[call.index], strict=True):
            has_graph = isinstance(root, GradientEdge) or (root is not None and root.requires_grad)
            # If later stages do not use an output, zeros arrive. One process would run no backward from that output.
            if has_graph and grad is not None and (meta.comes_back or bool(grad.any())):
                roots.append(root)
                grads.append(grad)
        return roots, grads

    def backward_root(self, output: Hop) -> Hop:
        return Hop([backward_root(tensor) for tensor in output.tensors])


def _memory_of(module: nn.Module) -> set[int]:
    """The addresses of the buffers of ``module``, and of tensors that are attributes of its modules."""
    held = [value for one in module.modules() for value in vars(one).values() if isinstance(value, Tensor)]
    return {_memory(tensor) for tensor in (*module.buffers(), *held)} - {0}


def _memory(tensor: Tensor) -> int:
    """The address of the memory of ``tensor``; 0 if it has none, as a sparse or sharded tensor."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and type(tensor) in (Tensor, nn.Parameter)
    return tensor.untyped_storage().data_ptr() if plain else 0
