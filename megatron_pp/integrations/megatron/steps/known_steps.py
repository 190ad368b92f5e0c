"""A microbatch through a chunk as Megatron's `forward_step` and `backward_step` run it, where their meaning is known
(`STEP_SOURCES` of `releases/sources.py`). What they look up for each microbatch is looked up once a step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.runtime.engine.compute import Activation, LossRecord, backward_under
from megatron_pp.runtime.step import Step

# Config fields by which `forward_step_calc_loss` has work on stages without a loss.
_SCALES = (
    "num_moe_experts", "mtp_num_layers", "experimental_attention_variant",
    "experimental_attention_variant_loss_scale_func",
)  # fmt: skip


class MicrobatchSteps:
    """Runs the microbatches of a step under Megatron. `record` holds the reports of the loss function and this rank's
    number of tokens.
    """

    def __init__(self, megatron: Megatron, step: Step) -> None:
        self.schedules = megatron.schedules
        self.inputs = step.inputs
        self.config = step.inputs.config
        self.of_rank = step.of_rank
        self.cp_size = step.cp_size
        self.record = LossRecord(num_tokens=torch.zeros([], dtype=torch.int, device=step.communicator.device))
        self.drops = [wrapped_attribute(chunk, "drop_received", lambda: None) for chunk in step.inputs.chunks]


class KnownSteps(MicrobatchSteps):
    """Losses and their scales are still computed by the release's `forward_step_calc_loss`, and microbatches numbered
    by its `set_current_microbatch`, where these two have an effect.
    """

    def __init__(self, megatron: Megatron, step: Step) -> None:
        super().__init__(megatron, step)
        inputs, config, chunks = step.inputs, step.inputs.config, step.inputs.chunks
        self.timers = config.timers
        self._backward = backward_under(config.timers)
        self.grad_scale_func = config.grad_scale_func
        self.autocast: AbstractContextManager[Any] = (
            torch.autocast("cuda", dtype=config.autocast_dtype) if config.enable_autocast else nullcontext()
        )
        self._set_input = [self.schedules.get_attr_wrapped_model(chunk, "set_input_tensor") for chunk in chunks]
        is_first = self.schedules.check_first_val_step(inputs.first_val_step, inputs.forward_only, True)
        self._mark_first: list[Any] = [
            getattr(chunk, "set_is_first_microbatch", None) if is_first else None for chunk in chunks
        ]
        self._numbered = [_with_numbered_layers(chunk) for chunk in chunks]
        scales = any(getattr(config, name, None) is not None for name in _SCALES)
        self._has_loss = [
            scales or is_last or (inputs.chunked and getattr(chunk, "vp_stage", None) not in (None, number))
            for number, (chunk, is_last) in enumerate(zip(chunks, step.of_rank.is_last_stage, strict=True))
        ]

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        """The chunk's output; on the last stage the scaled loss."""
        inputs, timers, flags = self.inputs, self.timers, self.of_rank.checkpoint_flags
        if timers is not None:
            timers("forward-compute", log_level=2).start()
        if mb == 0 and self._mark_first[chunk] is not None:
            self._mark_first[chunk]()
        if self._numbered[chunk] is not None:
            self.schedules.set_current_microbatch(self._numbered[chunk], mb)
        several = isinstance(input_tensor, list)
        self._set_input[chunk](input_tensor if several else [input_tensor])
        more = () if flags is None else (flags[(chunk, mb)],)
        with self.autocast:
            output, loss_func = inputs.forward_step_func(inputs.data_iterators[chunk], inputs.chunks[chunk], *more)
        if self._has_loss[chunk]:
            output = self._loss(chunk, output, loss_func)
        elif timers is not None:
            timers("forward-compute").stop()
        self.drops[chunk]()
        return [output] if several else output

    def _loss(self, chunk: int, output: Any, loss_func: Any) -> Any:
        inputs, is_last_stage = self.inputs, self.of_rank.is_last_stage[chunk]
        output, num_tokens = self.schedules.forward_step_calc_loss(
            inputs.chunks[chunk],
            output,
            loss_func,
            self.config,
            chunk if inputs.chunked else None,
            inputs.collect_non_loss_data,
            inputs.num_microbatches,
            self.record.data,
            self.cp_size,
            is_last_stage,
        )
        if is_last_stage:
            self.record.num_tokens += num_tokens
        return output

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
        """Run the backward of the first output if there are several, as Megatron does."""
        return self._backward(input_tensor, _first(output), _first(output_grad), self.grad_scale_func)

    @cached_property
    def backward_root(self) -> Callable[[Activation], Any]:
        """Called where the config asks for outputs without their data."""
        from megatron_pp.runtime.engine.deallocate import backward_root

        return backward_root


def _first(values: Activation) -> Any:
    return values[0] if isinstance(values, list) else values


def _with_numbered_layers(chunk: Any) -> Any:
    """The chunk, or what it wraps, from where `set_current_microbatch` finds layers to number; None where it would find
    none, each time anew.
    """
    while chunk is not None and not hasattr(chunk, "decoder") and not hasattr(chunk, "vision_model"):
        chunk = getattr(chunk, "module", None)
    return chunk
