"""Runs a user's ``forward_step_func`` on this rank's model chunks: forwards, whose loss is scaled as in Megatron, and
backwards. Under Megatron-core, Megatron's own functions take this place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_pp.common.module_attributes import wrapped_attributes
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime.engine.compute import Activation, LossRecord, backward_under
from megatron_pp.runtime.engine.deallocate import backward_root


@dataclass
class StepOptions:
    """Options of one step, for a ``Steps``; see the schedules' arguments of the same names.

    is_last_stage     per chunk of this rank
    checkpoint_flags  per (chunk, microbatch): Megatron's third argument of forward_step_func; None where it takes two
    whole_sequence    turns a shard's sum and tokens into those of the sequence; None without context parallelism"""

    num_microbatches: int
    is_last_stage: Sequence[bool]
    device_type: str = "cpu"
    cp_size: int = 1
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    checkpoint_flags: dict[tuple[int, int], bool] | None = None
    whole_sequence: Callable[[Any, Any], tuple[Any, Any]] | None = None


def scaled_loss(
    output: Any, loss_func: Callable[..., Any] | None, settings: StepSettings, options: StepOptions, record: LossRecord
) -> Any:
    """Apply the loss function on the last stage and scale its loss as Megatron does.

    A pair (loss, report) is a mean over the microbatch: multiplied by the context-parallel size and divided by the
    microbatch count. A triple (loss, num_tokens, report) is a sum over tokens: divided by the tokens of the microbatch
    on all context-parallel ranks (at least 1; ``context_parallel_loss``) and the microbatch count, unless
    ``calculate_per_token_loss``, where the division is left to finalisation (Megatron-LM#1652). None leaves the output
    as it is and reports it."""
    if loss_func is None:
        if not options.forward_only and not _is_any_trained(output):
            raise ScheduleInputError(_NO_GRADIENT)
        record.data.append(output)
        return output
    if options.collect_non_loss_data:
        record.data.append(loss_func(output, non_loss_data=True))
        return output
    outputs = loss_func(output)
    if not isinstance(outputs, (tuple, list)) or len(outputs) not in (2, 3):
        raise ScheduleInputError(
            f"the loss function returned {type(outputs).__name__}; it must return (loss, report) or (loss, "
            "num_tokens, report)"
        )
    loss, report = outputs[0], outputs[-1]
    if not isinstance(loss, torch.Tensor) and (loss is None or not options.forward_only):
        raise ScheduleInputError(f"the loss function returned a {type(loss).__name__} as its loss; it must be a tensor")
    if isinstance(loss, torch.Tensor):
        check_loss(loss, not options.forward_only)
    if len(outputs) == 3:
        tokens = outputs[1]
        record.num_tokens += tokens  # in place: another stream may still read the old sum
        if not settings.calculate_per_token_loss:
            if options.whole_sequence is not None:
                loss, tokens = options.whole_sequence(loss, tokens)
            at_least_1 = tokens.clamp(min=1) if isinstance(tokens, torch.Tensor) else max(tokens, 1)
            loss = loss / at_least_1 / options.num_microbatches
    else:
        loss = (loss * options.cp_size if options.cp_size != 1 else loss) / options.num_microbatches
    record.data.append(report)
    return loss


_NO_GRADIENT = (
    "the loss of a training step needs no gradient, so that its backward would train nothing: it was detached or "
    "computed under torch.no_grad(), or nothing that it depends on is trained. To run forwards alone, evaluate "
    "(forward_only=True; eval() of torch's stages)"
)


def check_loss(loss: torch.Tensor, trains: bool) -> None:
    """Raises ScheduleInputError for a loss from which no backward can start, in the forward that has made it."""
    if loss.requires_grad and loss.numel() != 1:
        raise ScheduleInputError(f"the loss has shape {list(loss.shape)}; it must be one number, as of mean() or sum()")
    if trains and not loss.requires_grad:
        raise ScheduleInputError(_NO_GRADIENT)


def _is_any_trained(output: Any) -> bool:
    tensors = output if isinstance(output, (list, tuple)) else [output]
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in tensors)


_CHUNK_METHODS = ("set_input_tensor", "set_is_first_microbatch", "set_current_microbatch", "drop_received")


@dataclass(eq=False)
class ModelSteps:
    """Runs a user's ``forward_step_func`` on this rank's model chunks. ``record`` holds the losses afterwards."""

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Any]
    chunks: Sequence[Any]
    settings: StepSettings
    options: StepOptions
    record: LossRecord = field(default_factory=LossRecord, init=False)

    backward_root = staticmethod(backward_root)

    def __post_init__(self) -> None:
        self.timers = self.settings.timers
        self.run_backward = backward_under(self.timers)
        self.grad_scale_func = self.settings.grad_scale_func
        found = [wrapped_attributes(chunk, _CHUNK_METHODS) for chunk in self.chunks]
        self._set_input = [_checked_setter(one[0], chunk) for one, chunk in zip(found, self.chunks, strict=True)]
        self._mark_first = [one[1] for one in found]
        self._mark_microbatch = [one[2] for one in found]
        self._drop_received = [one[3] for one in found]

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        options = self.options
        if self.timers is not None:
            self.timers("forward-compute", log_level=2).start()
        # Megatron's rule: while validating, FP8 weights are refreshed on the first validation step only.
        refreshes = mb == 0 and (not options.forward_only or options.first_val_step in (None, True))
        if refreshes and self._mark_first[chunk] is not None:
            self._mark_first[chunk]()
        if self._mark_microbatch[chunk] is not None:
            self._mark_microbatch[chunk](mb)
        self._set_input[chunk](input_tensor if isinstance(input_tensor, list) else [input_tensor])
        try:
            if self.settings.enable_autocast:
                dtype = self.settings.autocast_dtype or self.settings.pipeline_dtype
                with torch.autocast(options.device_type, dtype=dtype):
                    output, loss_func = self._call(chunk, mb)
            else:
                output, loss_func = self._call(chunk, mb)
            if options.is_last_stage[chunk]:
                output = scaled_loss(output, loss_func, self.settings, options, self.record)
        finally:
            if self._drop_received[chunk] is not None:
                self._drop_received[chunk]()
        if self.timers is not None:
            self.timers("forward-compute").stop()
        return output

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
        return self.run_backward(input_tensor, output, output_grad, self.grad_scale_func)

    def _call(self, chunk: int, mb: int) -> tuple[Any, Any]:
        flags = self.options.checkpoint_flags
        more = () if flags is None else (flags[(chunk, mb)],)
        try:
            returned = self.forward_step_func(self.data_iterators[chunk], self.chunks[chunk], *more)
        except StopIteration as end:
            raise ScheduleInputError(
                f"the data iterator of chunk {chunk} ended at microbatch {mb}; a step of "
                f"{self.options.num_microbatches} microbatches needs that many items. (StopIteration was raised"
                f"{_place_of(end)}; if no data are drawn there, another iterator has ended)"
            ) from end
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise ScheduleInputError(
                f"forward_step_func returned a {type(returned).__name__}; it must return (output, loss function)"
            )
        return returned[0], returned[1]


def _place_of(error: BaseException) -> str:
    """The place where the error was raised, in words."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    code = None if last is None else last.tb_frame.f_code
    return "" if last is None or code is None else f" in {code.co_name}, {code.co_filename}, line {last.tb_lineno}"


def _checked_setter(setter: Any, chunk: Any) -> Callable[[list[Any]], None]:
    if setter is None:
        raise ScheduleInputError(
            f"model chunk {type(chunk).__name__} has no set_input_tensor(tensors), by which a stage gets the output "
            "of the stage before it; wrap a plain module as megatron_pp.PipelineStage(module, config, stage=number)"
        )
    return setter
