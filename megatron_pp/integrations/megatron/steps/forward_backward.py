"""A microbatch through a chunk, by the functions of the installed Megatron-core."""

from typing import Any

import torch

from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.steps.known_steps import MicrobatchSteps
from megatron_pp.runtime.engine.compute import Activation
from megatron_pp.runtime.step import Step


class MegatronSteps(MicrobatchSteps):
    """Runs a microbatch through a chunk with the `forward_step` and `backward_step` of the installed Megatron-core, so
    that MoE's auxiliary loss scale, multi-token prediction, context-parallel loss factors and CUDA graph flags are that
    release's. It is used for releases whose functions are not known, and for models that `KnownSteps` does not serve.

    `overridden`: the config with the fields that `install()` overrides.
    """

    def __init__(self, megatron: Megatron, step: Step, overridden: Any) -> None:
        super().__init__(megatron, step)
        self.overridden = overridden
        self.deallocates = step.settings.deallocate_pipeline_outputs
        known = {
            "model_type": wrapped_attribute(step.inputs.chunks[0], "model_type"),
            "pipeline_model_parallel_size": step.communicator.size,
        }
        self.more_for_backward = {name: known[name] for name in megatron.row.backward_only}

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        """Megatron's `forward_step`; on the last stage the result is the scaled loss."""
        inputs = self.inputs
        flags = self.of_rank.checkpoint_flags
        output, num_tokens = self.schedules.forward_step(
            inputs.forward_step_func,
            inputs.data_iterators[chunk],
            inputs.chunks[chunk],
            inputs.num_microbatches,
            input_tensor,
            self.record.data,
            self.config,
            cp_group_size=self.cp_size,
            collect_non_loss_data=inputs.collect_non_loss_data,
            checkpoint_activations_microbatch=None if flags is None else flags[(chunk, mb)],
            is_first_microbatch=self.schedules.check_first_val_step(
                inputs.first_val_step, inputs.forward_only, mb == 0
            ),
            current_microbatch=mb,
            vp_stage=chunk if inputs.chunked else None,
            is_last_stage=self.of_rank.is_last_stage[chunk],
        )
        if self.of_rank.is_last_stage[chunk]:  # on other stages Megatron counts no tokens
            self.record.num_tokens += num_tokens
        self.drops[chunk]()
        return output

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
        """Megatron's `backward_step`; the gradient of `input_tensor`."""
        if output_grad is not None and self.deallocates:
            output = self.backward_root(output)  # needed also if its send is still pending
        return self.schedules.backward_step(
            input_tensor=input_tensor,
            output_tensor=output,
            output_tensor_grad=output_grad,
            config=self.overridden,
            **self.more_for_backward,
        )

    def backward_root(self, output: Activation) -> Any:
        """An output of one element from which Megatron's `backward_step` can start; its `custom_backward` needs one."""
        return freed_output(output)


class _InItsPlace(torch.autograd.Function):
    """A tensor at the place of ``x`` in the graph, without the data of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(1).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def freed_output(output: Any) -> Any:
    """``output``, or each tensor of a list, with one element. Tensors saved or held elsewhere keep their data."""
    if isinstance(output, (list, tuple)):
        return [freed_output(item) for item in output]
    if not isinstance(output, torch.Tensor) or output.numel() == 1:
        return output
    alias: torch.Tensor = _InItsPlace.apply(output)
    alias.data = output.new_empty(1)
    return alias
