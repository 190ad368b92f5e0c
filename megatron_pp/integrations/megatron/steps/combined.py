"""Megatron-core's combined 1F1B (`overlap_moe_expert_parallel_comm`): the layers of one microbatch's forward and of
another's backward in turn, so that the all-to-all of experts in one hides behind the other's compute.

Megatron's own `combined_forward_backward_step` and schedule plans run lone forwards, lone backwards and pairs. The
engine's plan says which, and when.
"""

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from megatron_pp.features.pairs.pair_runner import BackwardHalf, ForwardHalf, Ready
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.steps.forward_backward import MegatronSteps
from megatron_pp.integrations.megatron.steps.v_placement import ChunkPlace
from megatron_pp.runtime.engine.compute import Activation
from megatron_pp.runtime.step import Step

NOTHING = ForwardHalf(0, 0, None)
NO_BACKWARD = BackwardHalf(0, 0, None, None, None)


# Parameters that its step has in all releases of `releases/versions.py`'s TABLE.
STEP = (
    "forward_step_func", "data_iterator", "f_model", "num_microbatches", "input_tensor", "forward_data_store",
    "b_model", "b_input_tensor", "b_output_tensor", "b_output_tensor_grad", "config", "f_model_chunk_id",
    "post_forward", "post_backward", "collect_non_loss_data", "checkpoint_activations_microbatch",
    "is_first_microbatch", "current_microbatch",
)  # fmt: skip


@dataclass(frozen=True)
class Combined:
    """The installed release's functions for combined 1F1B: the step, and the one that makes its streams."""

    step: Callable[..., Any]
    set_streams: Callable[..., Any]
    takes_priority: bool


def of_release() -> Combined | None:
    """The installed release's functions; None if it has none, or if they have another signature."""
    try:
        step = importlib.import_module("megatron.core.pipeline_parallel.combined_1f1b").combined_forward_backward_step
        set_streams = importlib.import_module("megatron.core.pipeline_parallel.utils").set_streams
    except (ImportError, AttributeError):
        return None
    return _checked(step, set_streams)


@lru_cache(maxsize=1)
def _checked(step: Callable[..., Any], set_streams: Callable[..., Any]) -> Combined | None:
    parameters = inspect.signature(step).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    if not needed <= set(STEP) <= set(parameters):
        return None
    return Combined(step, set_streams, "high_priority" in inspect.signature(set_streams).parameters)


def reason_of_release() -> str | None:
    """Why such steps of the installed release are not served, as the object of "does not serve ..."; None where they
    are.
    """
    known = of_release() is not None
    return None if known else "the combined 1F1B as this release has it (config.overlap_moe_expert_parallel_comm)"


class CombinedSteps(MegatronSteps):
    """Runs microbatches by their schedule plans. An output carries its plan from its forward to its backward."""

    def __init__(self, megatron: Megatron, step: Step, overridden: Any, in_v: bool = False) -> None:
        super().__init__(megatron, step, overridden)
        combined = of_release()
        assert combined is not None, "served/scope.py hands such a step back"
        self.step = combined.step
        chunks = range(len(step.inputs.chunks))
        self.places: list[AbstractContextManager[Any]] = [
            ChunkPlace(megatron.parallel_state, chunk) if in_v else nullcontext() for chunk in chunks
        ]
        priority = {"high_priority": overridden.high_priority_a2a_comm_stream} if combined.takes_priority else {}
        combined.set_streams(**priority)

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        return self.forward_and_backward(ForwardHalf(chunk, mb, input_tensor), None)[0]

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
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
        inputs = self.inputs
        flags = self.of_rank.checkpoint_flags
        f = forward or NOTHING
        b = backward or NO_BACKWARD
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
        if forward is not None and self.of_rank.is_last_stage[f.chunk]:
            self.record.num_tokens += num_tokens
        return output, grad

    def backward_root(self, output: Activation) -> Any:
        """`output` itself without its data, because it carries its schedule plan."""
        for tensor in output if isinstance(output, (list, tuple)) else (output,):
            if tensor.is_cuda:  # the stream of the all-to-alls made it, and the current stream has waited for the send
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self.schedules.deallocate_output_tensor(tensor, True)
        return output


def _hook(ready: Ready | None) -> Callable[..., None] | None:
    """The function that a schedule plan calls with a result and the chunk's number."""
    return None if ready is None else lambda result, vp_stage=None: ready(result)
