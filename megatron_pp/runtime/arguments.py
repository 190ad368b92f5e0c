"""The arguments of one call of a schedule function, checked and put in order before any communication, and the groups
that they name."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.config.checks import whole_number
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError

REQUIRED_ARGUMENTS = ("forward_step_func", "data_iterator", "model", "num_microbatches")
whole_argument = partial(whole_number, error=ScheduleInputError)


def check_required(function: str, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError if a required argument is missing; names the function that the user called."""
    missing = [name for name in REQUIRED_ARGUMENTS if name not in arguments]
    if missing:
        raise TypeError(f"{function}() is missing the keyword argument(s) {', '.join(missing)}")


@dataclass
class StepInputs:
    """The arguments of ``get_forward_backward_func``, with lists ``chunks`` and ``data_iterators`` of ``model`` and
    ``data_iterator``, and the ``config`` found on the model.

    ``chunked``: the schedule takes lists of model chunks and data iterators. Raises ScheduleInputError for a missing
    list, chunks and iterators that differ in number, a microbatch count below 1, or training without gradients."""

    chunked: bool
    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int | None = None
    micro_batch_size: int | None = None
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool = False
    config: Any = None  # by default the model's

    def __post_init__(self) -> None:
        self.chunks = self._listed(self.model, "model chunks, one per virtual stage")
        self.data_iterators: Sequence[Any] = self._listed(self.data_iterator, "data iterators, one per model chunk")
        self._check_numbers()
        given = [id(iterator) for iterator in self.data_iterators if iterator is not None]
        if len(set(given)) < len(given):
            from megatron_pp.runtime import shared_iterators

            self.data_iterators = shared_iterators.told_apart(self.data_iterators)
        if self.config is None:
            self.config = wrapped_attribute(self.chunks[0], "config")
        if self.config is None:
            raise ScheduleInputError(
                f"model chunk {type(self.chunks[0]).__name__} has no attribute config; set it to a TransformerConfig"
            )
        if type(self.num_microbatches) is not int or self.num_microbatches < 1:
            self.num_microbatches = whole_argument("num_microbatches", self.num_microbatches)
        self.forward_only = bool(self.forward_only)
        for name in ("seq_length", "micro_batch_size", "decoder_seq_length"):
            if hasattr(given := getattr(self, name), "__index__"):  # a tensor's, as packed data may have it, or numpy's
                setattr(self, name, operator.index(given))
        if not self.forward_only and (torch.is_inference_mode_enabled() or not torch.is_grad_enabled()):
            mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
            raise ScheduleInputError(
                f"a training step was called under {mode}, where no gradient is computed; call it outside of that, or "
                "with forward_only=True"
            )
        if not callable(self.forward_step_func):
            raise ScheduleInputError(
                f"forward_step_func is a {type(self.forward_step_func).__name__}; it must be callable"
            )

    def _listed(self, given: Any, what: str) -> list[Any]:
        if isinstance(given, (list, tuple)):
            return list(given)
        if self.chunked:
            raise ScheduleInputError(
                f"the interleaved schedule takes a list of {what}; it was given a {type(given).__name__}"
            )
        return [given]

    def _check_numbers(self) -> None:
        chunks, iterators = len(self.chunks), len(self.data_iterators)
        if not chunks:
            raise ScheduleInputError("model is an empty list; it must hold this rank's model chunks")
        if not self.chunked and chunks != 1:
            raise ScheduleInputError(
                f"a schedule without model chunks takes one model; it was given a list of {chunks}"
            )
        if iterators != chunks:
            raise ScheduleInputError(
                f"{iterators} data iterators were given for {chunks} model chunks; give one per chunk (None where a "
                "chunk needs no data)"
            )


def group_sizes(pg_collection: Any, settings: StepSettings) -> tuple[int, int]:
    """(tensor, context) parallel sizes: of the given process groups, or else of parallel_state if it is initialised, or
    else of the config."""
    tp, cp = getattr(pg_collection, "tp", None), getattr(pg_collection, "cp", None)
    return (
        _own_size("tp", settings.tensor_model_parallel_size) if tp is None else tp.size(),
        _own_size("cp", settings.context_parallel_size) if cp is None else cp.size(),
    )


def _own_size(kind: str, default: int) -> int:
    from megatron_pp.comm import own_groups

    return own_groups.size_of(kind) if own_groups.model_parallel_is_initialized() else default


def pipeline_group(inputs: StepInputs, alone: bool) -> Any:
    """The pipeline group of the caller's communicator or collection, or that of ``parallel_state``; None for a rank
    alone. Raises ScheduleInputError where there is none."""
    given = inputs.p2p_communicator
    if isinstance(given, P2PCore):
        return given.pp_group
    group = getattr(given, "pp_group", None)
    if group is None:
        group = getattr(inputs.pg_collection, "pp", None)
    if group is None:
        from megatron_pp.comm import own_groups

        group = own_groups.pipeline(alone)
    return getattr(group, "group", group)  # a group of slime's wraps the real one, which it destroys and makes anew
