"""The entry points that a Megatron user calls, with Megatron-core's signatures and semantics.

One engine (``runtime/engine/executor.py``) runs every schedule. In one place it waits for a send's handle before it
frees the output's data.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from typing_extensions import Unpack

from megatron_pp.comm import own_groups
from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.common.names import did_you_mean
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.orders.family import Shape
from megatron_pp.plan.orders.interleaved import schedule_table, warmup_forwards
from megatron_pp.runtime.arguments import StepInputs, check_required
from megatron_pp.runtime.engine.compute import Activation, backward_through
from megatron_pp.runtime.engine.model_steps import ModelSteps, StepOptions
from megatron_pp.runtime.engine.swapped_outputs import custom_backward, deallocate_output_tensor
from megatron_pp.runtime.message_shapes import tensor_shapes
from megatron_pp.runtime.own_host import OwnHost
from megatron_pp.runtime.run_step import prepared, run_step

if TYPE_CHECKING:
    from megatron_pp.comm.p2p_communicator import P2PCommunicator

__all__ = [
    "P2PCommunicator", "backward_step", "custom_backward", "deallocate_output_tensor", "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving", "forward_step",
    "get_forward_backward_func", "get_pp_rank_microbatches", "get_schedule_table", "get_tensor_shapes",
]  # fmt: skip

ForwardBackward = Callable[..., list[Any]]


def __getattr__(name: str) -> Any:
    if name == "P2PCommunicator":  # the engine does without it
        from megatron_pp.comm.p2p_communicator import P2PCommunicator

        return P2PCommunicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class StepArguments(TypedDict, total=False):
    """The keyword arguments of the schedule functions; the first four are required.

    ``forward_step_func`` is (data_iterator, model[, checkpoint_activations_microbatch]) -> (output, loss_func). On the
    last stage loss_func(output) -> (loss, report) or (loss, num_tokens, report). If it is None, the output is reported.
    Tensors between stages are [seq_length / cp [/ tp], micro_batch_size, hidden_size].
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any  # one, or with chunks a list
    model: Any  # likewise
    num_microbatches: int  # M >= 1
    seq_length: int | None
    micro_batch_size: int | None
    decoder_seq_length: int | None  # used instead of seq_length where given
    forward_only: bool  # evaluation: no graph is built, no gradient touched
    collect_non_loss_data: bool  # loss_func(output, non_loss_data=True) is reported
    first_val_step: bool | None  # FP8 weights are refreshed on the first validation step only
    # (receive shapes, send shapes) -> the same adjusted, one per tensor, or dicts of name -> shape for stages that give
    # each other dicts; not with chunks
    adjust_tensor_shapes_fn: Callable[..., Any] | None
    p2p_communicator: Any  # the pipeline group to use, as pg_collection; by default parallel_state's
    pg_collection: Any
    force_all_reduce: bool  # handed to config.finalize_model_grads_func


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> ForwardBackward:
    """The schedule function for a pipeline of ``pp_size`` ranks with ``vp_size`` model chunks each. If neither is
    given, both come from ``parallel_state``.

    The function takes the keywords of StepArguments. On the last stage it returns what the loss function reported, in
    the order of the microbatches; elsewhere it returns an empty list. It raises ScheduleInputError before any
    communication if an argument is impossible.
    """
    if pp_size is None and vp_size is None:
        pp_size = own_groups.size_of("pp")
        vp_size = own_groups.virtual_size()
    pipelined = pp_size is not None and pp_size > 1
    if (vp_size or 0) > 1 or (pipelined and vp_size is not None):
        return forward_backward_pipelining_with_interleaving
    return forward_backward_pipelining_without_interleaving if pipelined else forward_backward_no_pipelining


def forward_backward_no_pipelining(**arguments: Unpack[StepArguments]) -> list[Any]:
    """Run all microbatches through the whole model on this rank. Arguments: StepArguments."""
    _check_keywords("forward_backward_no_pipelining", arguments)
    return _run(OwnHost(StepInputs(False, **arguments), alone=True))


def forward_backward_pipelining_without_interleaving(**arguments: Unpack[StepArguments]) -> list[Any]:
    """Run a step with one model chunk a rank, as 1F1B unless the config names a schedule. Arguments: StepArguments."""
    _check_keywords("forward_backward_pipelining_without_interleaving", arguments)
    return _run(OwnHost(StepInputs(False, **arguments), alone=False))


def forward_backward_pipelining_with_interleaving(**arguments: Unpack[StepArguments]) -> list[Any]:
    """Run a step with several model chunks a rank, interleaved 1F1B by default. Arguments: StepArguments."""
    _check_keywords("forward_backward_pipelining_with_interleaving", arguments)
    return _run(OwnHost(StepInputs(True, **arguments), alone=False))


def _check_keywords(function: str, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError, naming the function that the user called, for a keyword it does not take or lacks."""
    known = StepArguments.__annotations__
    for name in arguments:
        if name not in known:
            hint = did_you_mean(name, known) or f"; it takes {', '.join(known)}"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    check_required(function, arguments)


def _run(host: OwnHost) -> list[Any]:
    return run_step(prepared(host), host)


def forward_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    input_tensor: Activation,
    forward_data_store: list[Any],
    config: Any,
    cp_group_size: int = 1,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[Activation, Any]:
    """Megatron's function of this name: run one microbatch forward through one chunk. Returns (output or scaled loss,
    number of tokens).

    ``input_tensor`` is a tensor, None, or a list of them (then a list is returned).
    """
    expected = getattr(model, "vp_stage", None)
    if vp_stage is not None and expected is not None and vp_stage != expected:
        raise ScheduleInputError(
            f"chunk {vp_stage} was given the model whose vp_stage is {expected}; pass the chunks in order"
        )
    mb, flag = current_microbatch or 0, checkpoint_activations_microbatch
    options = StepOptions(
        num_microbatches,
        [is_last_stage],
        device_type=_device_type(input_tensor, model),
        cp_size=cp_group_size,
        collect_non_loss_data=collect_non_loss_data,
        checkpoint_flags=None if flag is None else {(0, mb): flag},
        forward_only=True,  # with first_val_step False, the first-microbatch mark is left to the caller: here
        first_val_step=False,
    )
    mark_first = wrapped_attribute(model, "set_is_first_microbatch")
    if is_first_microbatch and mark_first is not None:
        mark_first()
    steps = ModelSteps(forward_step_func, [data_iterator], [model], StepSettings.from_config(config), options)
    steps.record.data = forward_data_store
    output = steps.forward(0, mb, input_tensor)
    return ([output] if isinstance(input_tensor, list) else output), steps.record.num_tokens


def backward_step(
    input_tensor: Activation,
    output_tensor: Activation,
    output_tensor_grad: Activation,
    model_type: Any = None,
    config: Any = None,
) -> Activation:
    """Megatron's function of this name, called with ``(..., config)`` or, as up to 0.16, ``(..., model_type, config)``.

    Returns the gradient of ``input_tensor``: None if it has none, a list for a list.
    """
    config = model_type if config is None else config
    for x in input_tensor if isinstance(input_tensor, (list, tuple)) else [input_tensor]:
        if x is not None and x.requires_grad:
            x.retain_grad()
    scale = StepSettings.from_config(config).grad_scale_func
    return backward_through(input_tensor, output_tensor, output_tensor_grad, scale)


def _device_type(input_tensor: Activation, model: Any) -> str:
    first = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
    if isinstance(first, torch.Tensor):
        return first.device.type
    parameter = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    return "cpu" if parameter is None else parameter.device.type


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Megatron's table of an interleaved schedule: (microbatch, model chunk) of each virtual microbatch."""
    return schedule_table(num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage)


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: Any = None,
) -> tuple[int, bool, int, int]:
    """Megatron's numbers for this rank: (virtual microbatches, whether all are warm-up, warm-up, remaining)."""
    if p2p_communicator is not None:
        size, rank = p2p_communicator.pp_group.size(), p2p_communicator.pp_group.rank()
        chunked = p2p_communicator.virtual_pipeline_model_parallel_size is not None
    else:
        size, rank = own_groups.size_of("pp"), own_groups.rank_in("pp")
        chunked = own_groups.virtual_size() is not None
    total = num_microbatches * num_model_chunks
    if forward_only:
        warmup = total
    elif size == 1:
        warmup = 0
    elif chunked:
        shape = Shape(size, num_model_chunks, num_microbatches, microbatch_group_size_per_vp_stage)
        warmup = warmup_forwards(shape, rank) + bool(overlap_moe_expert_parallel_comm)
    else:
        warmup = size - 1 - rank
    return total, warmup >= total, min(warmup, total), total - min(warmup, total)


def get_tensor_shapes(
    *, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None, config: Any, tp_group: Any, cp_group: Any
) -> list[tuple[int, int, int]]:
    """Megatron's function of this name: shapes of the tensors between stages, one per tensor."""
    return tensor_shapes(seq_length, micro_batch_size, decoder_seq_length, config, tp_group.size(), cp_group.size())
