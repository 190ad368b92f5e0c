"""What a caller gives to a schedule, checked and put in order before any communication."""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch

from megatron_pp.comm import process_groups as parallel_state
from megatron_pp.config.checks import whole_number
from megatron_pp.config.microbatch_counts import MicrobatchCount, check_group_size, explain_microbatch_count
from megatron_pp.config.rules import lowering_policy
from megatron_pp.errors import ConfigError, ExchangeError, PlanError, ScheduleInputError
from megatron_pp.module_attributes import wrapped_attribute
from megatron_pp.plan.family import Family
from megatron_pp.plan.instruction import BACKWARD_OPS, FORWARD, Instruction, without_pairs
from megatron_pp.plan.measured import Measured, measured_values
from megatron_pp.plan.orders import INTERLEAVED, ONE_F_ONE_B
from megatron_pp.plan.schedule_file import choices, find_family
from megatron_pp.plan.spec import CHANNELS, EXPLICIT, HOOKS, ONE_WAY, Plan, PlanSpec

logger = logging.getLogger("megatron_pp")
_SPEAKING = threading.Lock()
_whole_number = partial(whole_number, error=ScheduleInputError)
_Result = TypeVar("_Result")


@dataclass
class StepInputs:
    """The arguments of one call of a schedule: chunks and iterators as lists, the config found on the model, sizes
    checked.
    """

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Any]
    chunks: list[Any]
    config: Any
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


REQUIRED_ARGUMENTS = ("forward_step_func", "data_iterator", "model", "num_microbatches")


def check_keywords(function: str, arguments: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises TypeError, naming the function that the user called, for a keyword it does not take or lacks."""
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    missing = [name for name in REQUIRED_ARGUMENTS if name not in arguments]
    if missing:
        raise TypeError(f"{function}() is missing the keyword argument(s) {', '.join(missing)}")


def step_inputs(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    chunked: bool,
) -> StepInputs:
    """Check and order the arguments. ``chunked``: the schedule takes lists of model chunks and data iterators.

    Raises ScheduleInputError for a missing list, chunks and iterators that differ in number, a number of chunks other
    than the config's virtual pipeline size, a microbatch count below 1, or training where gradients are disabled.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if chunked and not isinstance(model, (list, tuple)):
        raise ScheduleInputError(
            "the interleaved schedule takes a list of model chunks, one per virtual stage; it was given a "
            f"{type(model).__name__}"
        )
    if not chunks:
        raise ScheduleInputError("model is an empty list; it must hold this rank's model chunks")
    if not chunked and len(chunks) != 1:
        raise ScheduleInputError(
            f"a schedule without model chunks takes one model; it was given a list of {len(chunks)}"
        )
    iterators = list(data_iterator) if isinstance(data_iterator, (list, tuple)) else [data_iterator]
    if chunked and not isinstance(data_iterator, (list, tuple)):
        raise ScheduleInputError(
            "the interleaved schedule takes a list of data iterators, one per model chunk; it was given a "
            f"{type(data_iterator).__name__}"
        )
    if len(iterators) != len(chunks):
        raise ScheduleInputError(
            f"{len(iterators)} data iterators were given for {len(chunks)} model chunks; give one per chunk (None "
            "where a chunk needs no data)"
        )
    config = wrapped_attribute(chunks[0], "config")
    if config is None:
        raise ScheduleInputError(
            f"model chunk {type(chunks[0]).__name__} has no attribute config; set it to a TransformerConfig"
        )
    virtual = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if chunked and virtual is not None and virtual != len(chunks):
        raise ScheduleInputError(
            f"{len(chunks)} model chunks were given, but config.virtual_pipeline_model_parallel_size is {virtual}; "
            "they must be equal"
        )
    num_microbatches = _whole_number("num_microbatches", num_microbatches)
    if not forward_only:
        _check_grad_mode()
    if not callable(forward_step_func):
        raise ScheduleInputError(f"forward_step_func is a {type(forward_step_func).__name__}; it must be callable")
    return StepInputs(
        forward_step_func,
        iterators,
        chunks,
        config,
        num_microbatches,
        forward_only,
        collect_non_loss_data,
        first_val_step,
    )


def _check_grad_mode() -> None:
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        raise ScheduleInputError(
            f"a training step was called under {mode}, where no gradient is computed; call it outside of that, or with "
            "forward_only=True"
        )


class WantedPlan(NamedTuple):
    """What config and arguments ask of a plan, checked; fields as PlanSpec's."""

    schedule: str
    pipeline_size: int
    num_chunks: int
    num_microbatches: int
    group_size: int
    policy: str
    channels: str
    forward_only: bool
    grad_sync: str
    param_sync: bool
    overlap_pairs: bool
    measured: Measured | None
    digest: str
    split_backward: bool
    max_pending_sends: int


def wanted_plan(inputs: StepInputs, pipeline_size: int, is_converted: bool) -> WantedPlan:
    """The plan that config and arguments ask for on this many ranks; ``is_converted``: the chunks put weight gradients
    off. Raises ScheduleInputError for what is wrong with
    the config, and for contradictions."""
    config, num_chunks = inputs.config, len(inputs.chunks)
    virtual = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
    if pipeline_size > 1 and num_chunks == 1 and virtual > 1:
        raise ScheduleInputError(
            f"one model was given, but config.virtual_pipeline_model_parallel_size is {virtual}; give a list of "
            f"{virtual} model chunks to forward_backward_pipelining_with_interleaving"
        )
    if pipeline_size > 1 and getattr(config, "pipeline_dtype", None) is None:
        raise ScheduleInputError(
            "config.pipeline_dtype is None; set it to the dtype of the activations between stages, such as "
            "torch.bfloat16"
        )
    family = _family(config, num_chunks)
    training = not inputs.forward_only
    return WantedPlan(
        schedule=family.name,
        pipeline_size=pipeline_size,
        num_chunks=num_chunks,
        num_microbatches=inputs.num_microbatches,
        group_size=_group_size(config, pipeline_size, num_chunks),
        policy=_policy(config),
        channels=_channels(config),
        forward_only=inputs.forward_only,
        grad_sync=HOOKS if getattr(config, "grad_sync_func", None) is None else EXPLICIT,
        param_sync=training and getattr(config, "param_sync_func", None) is not None,
        overlap_pairs=training and getattr(config, "overlapped_forward_backward", None) is not None,
        measured=_measured(config) if family.search is not None else None,
        digest=family.digest,
        split_backward=is_converted or inputs.forward_only or not family.splits_weight,
        max_pending_sends=_whole_number("config.max_pending_sends", getattr(config, "max_pending_sends", 2), 0),
    )


@lru_cache(maxsize=256)
def plan_spec(wanted: WantedPlan, variable_shapes: bool, pollable: bool) -> PlanSpec:
    """The spec of what is wanted, where shapes travel ahead of tensors or not, and where a send can tell that it is
    done or not."""
    named: dict[str, Any] = wanted._asdict()
    most = named.pop("max_pending_sends")
    # A send is posted before the one that is ``release_after`` operations older is waited for: one more is pending.
    return PlanSpec(**named, variable_shapes=variable_shapes, release_after=1 if pollable else max(1, most - 1))


def _family(config: Any, num_chunks: int) -> Family:
    schedule: str = getattr(config, "pipeline_schedule", None) or (INTERLEAVED if num_chunks > 1 else ONE_F_ONE_B)
    try:
        family = find_family(schedule)
    except ExchangeError as error:
        raise ScheduleInputError(f"config.pipeline_schedule: {error}") from error
    except PlanError as error:
        raise ScheduleInputError(f"config.pipeline_schedule is {schedule!r}; it must be {choices()}") from error
    if family.chunks is not None and family.chunks != num_chunks:
        raise ScheduleInputError(
            f"config.pipeline_schedule {schedule!r} needs {family.chunks} model chunk(s) a rank; {num_chunks} were "
            "given"
        )
    return family


def _measured(config: Any) -> Measured | None:
    """What the automatic schedules plan for: ``config.pipeline_measured``."""
    try:
        return measured_values(getattr(config, "pipeline_measured", None))
    except PlanError as error:
        raise ScheduleInputError(f"config.pipeline_measured: {error}") from error


def _group_size(config: Any, pipeline_size: int, num_chunks: int) -> int:
    size = getattr(config, "microbatch_group_size_per_vp_stage", None)
    return _checked(check_group_size, pipeline_size, num_chunks, size)


def _channels(config: Any) -> str:
    channels: str = getattr(config, "p2p_channels", ONE_WAY)
    if channels not in CHANNELS:
        raise ScheduleInputError(f"config.p2p_channels is {channels!r}; it must be {' or '.join(CHANNELS)}")
    return channels


def _policy(config: Any) -> str:
    return _checked(lowering_policy, config)


def _checked(rule: Callable[..., _Result], *args: Any) -> _Result:
    """What ``rule`` of a config answers, for configs that are not ours and were never checked."""
    try:
        return rule(*args)
    except ConfigError as error:
        raise ScheduleInputError(f"config.{error}") from error


def given_step_number(config: Any) -> int | None:
    """``config.step_number``, called if it is a function; None where there is none. Raises ScheduleInputError."""
    given = getattr(config, "step_number", None)
    number = given() if callable(given) else given
    return None if number is None else _whole_number("config.step_number", number, at_least=0)


def check_communicator(varies_for_communicator: bool, config: Any) -> None:
    """Raises ScheduleInputError where a communicator of the caller's sends shapes ahead of tensors and the config says
    that shapes are fixed, or the other way round."""
    if varies_for_communicator != shapes_vary(config):
        raise ScheduleInputError(
            f"p2p_communicator was made with variable_seq_lengths={varies_for_communicator}, the model's config has "
            f"variable_seq_lengths={shapes_vary(config)}; give both the same"
        )


def shapes_vary(config: Any) -> bool:
    """Whether microbatches differ in shape."""
    return any(getattr(config, name, False) for name in ("variable_seq_lengths", "mtp_standalone"))


def checkpoint_flags(
    config: Any, order: Sequence[Instruction], forward_only: bool = False
) -> dict[tuple[int, int], bool] | None:
    """Per (chunk, microbatch), whether Megatron checkpoints all its layers; None where the option is off.

    Of each window as long as a rank's in-flight microbatches, the first
    ``num_microbatches_with_partial_activation_checkpoints`` checkpoint in part only (arXiv 2205.05198, appendix C).
    ``order`` is that of training; evaluation with chunks counts, as in Megatron, as one window.
    """
    partial = getattr(config, "num_microbatches_with_partial_activation_checkpoints", None)
    if partial is None:
        return None
    singles = list(without_pairs(order))
    forwards = [at for at in singles if at.op == FORWARD]
    window = next((i for i, at in enumerate(singles) if at.op in BACKWARD_OPS), len(singles))
    if forward_only and any(op.chunk > 0 for op in forwards):
        window = len(forwards)
    return {(op.chunk, op.mb): k % window >= partial for k, op in enumerate(forwards)}


def tensor_shapes(
    *,
    seq_length: int | None,
    micro_batch_size: int | None,
    decoder_seq_length: int | None,
    config: Any,
    tp_size: int,
    cp_size: int,
) -> list[tuple[int, int, int]]:
    """Shapes of the activations between stages: [(sequence / cp [/ tp under sequence parallelism], microbatch,
    hidden)]. Raises ScheduleInputError where one of the three is not known.
    """
    name, given = (
        ("seq_length", seq_length) if decoder_seq_length is None else ("decoder_seq_length", decoder_seq_length)
    )
    why = "tensors between stages are [seq_length, micro_batch_size, hidden_size] unless config.variable_seq_lengths"
    length = _whole_number(name, given, hint=why) // cp_size
    if getattr(config, "sequence_parallel", False):
        length //= tp_size
    micro_batch_size = _whole_number("micro_batch_size", micro_batch_size, hint=why)
    hidden_size = _whole_number("config.hidden_size", getattr(config, "hidden_size", None), hint=why)
    return [(length, micro_batch_size, hidden_size)]


def group_sizes(pg_collection: Any, config: Any) -> tuple[int, int]:
    """(tensor, context) parallel sizes: from the process groups where given, from parallel_state where initialised,
    else from the config.
    """
    tp, cp = getattr(pg_collection, "tp", None), getattr(pg_collection, "cp", None)
    if parallel_state.model_parallel_is_initialized():
        tp_default = parallel_state.get_tensor_model_parallel_world_size()
        cp_default = parallel_state.get_context_parallel_world_size()
    else:
        tp_default = getattr(config, "tensor_model_parallel_size", 1) or 1
        cp_default = getattr(config, "context_parallel_size", 1) or 1
    return (tp_default if tp is None else tp.size()), (cp_default if cp is None else cp.size())


def say_if_slow(spec: PlanSpec) -> None:
    """Microbatch counts that leave a bubble are supported; say so, once each."""
    if not spec.forward_only:
        grouped = spec.num_chunks if spec.schedule == INTERLEAVED else 1
        verdict = _verdict(spec.num_microbatches, spec.pipeline_size, grouped, spec.group_size)
        if not verdict.full_speed:
            say_once(verdict.sentence)


@lru_cache(maxsize=128)
def _verdict(num_microbatches: int, pipeline_size: int, num_chunks: int, group_size: int) -> MicrobatchCount:
    return explain_microbatch_count(num_microbatches, pipeline_size, num_chunks, group_size or None)


def say_what_is_off(plan: Plan, is_converted: bool) -> None:
    """Say, once each, where the plan is not quite what its schedule's name promises."""
    if plan.remark:
        say_once(plan.remark)
    family = find_family(plan.spec.schedule)
    if not is_converted and family.splits_weight:
        say_once(
            f"schedule {family.name} splits backwards, but the model does all of each at once: convert its chunks with "
            "megatron_pp.weight_grad.split_weight_grad"
        )


def say_once(sentence: str) -> None:
    """A warning in the log of ``megatron_pp``, once per process."""
    with _SPEAKING:  # ranks may be threads of one process
        _say(sentence)


@lru_cache(maxsize=128)
def _say(sentence: str) -> None:
    logger.warning(sentence)


def default_pipeline_group() -> Any:
    """The pipeline group of ``parallel_state``. Raises ScheduleInputError where it is not initialised."""
    if not parallel_state.model_parallel_is_initialized():
        raise ScheduleInputError(
            "neither p2p_communicator nor pg_collection.pp was given and megatron_pp.parallel_state is not "
            "initialised; call parallel_state.initialize_model_parallel(pipeline_model_parallel_size=...) after "
            "torch.distributed.init_process_group"
        )
    return parallel_state.get_pipeline_model_parallel_group()
