"""Megatron-core's combined 1F1B (`overlap_moe_expert_parallel_comm`): the layers of one microbatch's forward and of
another's backward in turn, so that the all-to-all of experts in one hides behind the other's compute.

Megatron's own `combined_forward_backward_step` and schedule plans run lone forwards, lone backwards and pairs. The
engine's plan says which, and when.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_pp.features.pairs.joint_steps import BackwardHalf, ForwardHalf, Ready
from megatron_pp.integrations.megatron_release import Megatron
from megatron_pp.integrations.megatron_steps import MegatronSteps
from megatron_pp.integrations.v_placement import ChunkPlace
from megatron_pp.runtime.compute import Activation, StepOptions
from megatron_pp.runtime.step import StepCall

NOTHING = ForwardHalf(0, 0, None)
NO_BACKWARD = BackwardHalf(0, 0, None, None, None)


class CombinedSteps(MegatronSteps):
    """Runs microbatches by their schedule plans. An output carries its plan from its forward to its backward."""

    def __init__(
        self, megatron: Megatron, call: StepCall, overridden: Any, options: StepOptions, in_v: bool = False
    ) -> None:
        super().__init__(megatron, call, overridden, options)
        combined = megatron.combined
        assert combined is not None, "megatron_scope hands such a step back"
        self.step = combined.step
        chunks = range(len(call.inputs.chunks))
        self.places: list[AbstractContextManager[Any]] = [
            ChunkPlace(megatron.parallel_state, chunk) if in_v else nullcontext() for chunk in chunks
        ]
        priority = {"high_priority": overridden.high_priority_a2a_comm_stream} if combined.takes_priority else {}
        combined.set_streams(**priority)

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        """A lone forward."""
        return self.forward_and_backward(ForwardHalf(chunk, mb, input_tensor), None)[0]

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
        """A lone backward."""
        half = BackwardHalf(chunk, mb, input_tensor, output, output_grad)
        return self.forward_and_backward(None, half)[1]

    def forward_and_backward(
        self,
        forward: ForwardHalf | None,
        backward: BackwardHalf | None,
        on_output: Ready | None = None,
        on_input_grad: Ready | None = None,
    ) -> tuple[Activation, Activation]:
        """Megatron's `combined_forward_backward_step`: (output or scaled loss, gradient of the backward's input)."""
        inputs, options = self.inputs, self.options
        f, b = forward or NOTHING, backward or NO_BACKWARD
        flags = options.checkpoint_flags
        with self.places[f.chunk]:
            output, num_tokens, grad = self.step(
                inputs.forward_step_func,
                inputs.data_iterators[f.chunk],
                None if forward is None else inputs.chunks[f.chunk],
                inputs.num_microbatches,
                f.input_tensor,
                self.record.data,
                None if backward is None else inputs.chunks[b.chunk],
                b.input_tensor,
                b.output,
                b.output_grad,
                self.overridden,
                f_model_chunk_id=f.chunk if inputs.chunked else None,
                post_forward=_hook(on_output),
                post_backward=_hook(on_input_grad),
                collect_non_loss_data=inputs.collect_non_loss_data,
                checkpoint_activations_microbatch=None if flags is None else flags[(f.chunk, f.mb)],
                is_first_microbatch=self.schedules.check_first_val_step(
                    inputs.first_val_step, inputs.forward_only, f.mb == 0
                ),
                current_microbatch=None if forward is None else f.mb,
            )
        if forward is not None and options.is_last_stage[f.chunk]:
            self.record.num_tokens += num_tokens
        return output, grad

    def backward_root(self, output: Activation) -> Any:
        """`output` itself, which carries its schedule plan, without its data."""
        for tensor in output if isinstance(output, (list, tuple)) else (output,):
            if tensor.is_cuda:  # it was made on the stream of the all-to-alls, and the send waited for on this one
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self.schedules.deallocate_output_tensor(tensor, True)
        return output


def _hook(ready: Ready | None) -> Callable[..., None] | None:
    """What a schedule plan calls with a result and the chunk's number."""
    return None if ready is None else lambda result, vp_stage=None: ready(result)
