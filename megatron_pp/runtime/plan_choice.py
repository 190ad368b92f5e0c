"""The plan that a step's settings and arguments ask for."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.transport import Transport
from megatron_pp.common.log_once import log_once, logger, warn_once
from megatron_pp.config import rules
from megatron_pp.config.settings import StepSettings, checked
from megatron_pp.errors import PlanError, ScheduleInputError
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.feature import hooks_asked_by
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import EXPLICIT, HOOKS, Plan, PlanSpec
from megatron_pp.plan.orders import find_family
from megatron_pp.plan.orders.family import Family
from megatron_pp.runtime.arguments import StepInputs

if TYPE_CHECKING:
    from megatron_pp.plan.costs.measured import Measured


def draft_spec(
    inputs: StepInputs, settings: StepSettings, pipeline_size: int, is_converted: bool, joins: bool
) -> PlanSpec:
    """The PlanSpec without what depends on the communicator: contradictions raise ScheduleInputError before any
    communication. ``is_converted``: by ``split_weight_grad``; ``joins``: the model runs two operations as one."""
    num_chunks, training = len(inputs.chunks), not inputs.forward_only
    _check_chunks(settings, pipeline_size, num_chunks, inputs.chunked)
    added = hooks_asked_by(settings, joins)
    family: Family = checked(rules.schedule_family, settings.pipeline_schedule, num_chunks, added)
    group_size = settings.microbatch_group_size_per_vp_stage
    placement = Placement(family.placement, pipeline_size, num_chunks) if added else None
    more: dict[str, Any] = {}
    for hooks in added:
        more |= checked(hooks.of_config, settings, placement, training)
    timed = family.search is not None or any(hooks.needs_times(settings) for hooks in added)
    try:
        draft = _kept_spec(
            schedule=family.name,
            pipeline_size=pipeline_size,
            num_chunks=num_chunks,
            num_microbatches=inputs.num_microbatches,
            group_size=checked(rules.check_group_size, pipeline_size, num_chunks, group_size, family.small_groups),
            policy=settings.policy,
            channels=settings.p2p_channels,
            forward_only=inputs.forward_only,
            grad_sync=HOOKS if settings.grad_sync_func is None else EXPLICIT,
            param_sync=training and settings.param_sync_func is not None,
            measured=_measured(settings) if timed else None,
            digest=family.digest,
            split_backward=is_converted or inputs.forward_only or not family.splits_weight,
            **more,
        )
    except PlanError as error:
        raise ScheduleInputError(f"config: {error}") from error
    return draft


def _measured(settings: StepSettings) -> Measured | None:
    from megatron_pp.config.measured_values import measured_of

    found: Measured | None = checked(measured_of, settings)
    return found


def plan_spec(draft: PlanSpec, settings: StepSettings, communicator: P2PCore) -> PlanSpec:
    """``draft`` as a plan's spec that ``communicator`` can run. Raises ScheduleInputError if the caller's communicator
    has other channels than the config, or sends shapes ahead and the config does not (or the other way round)."""
    for name, field in (("variable_seq_lengths", "shapes_vary"), ("p2p_channels", "p2p_channels")):
        its, ours = getattr(communicator.settings, field), getattr(settings, field)
        if its != ours:
            raise ScheduleInputError(
                f"p2p_communicator was made with {name}={its}, the model's config has {name}={ours}; give both the same"
            )
    by_device = fields_of_device(settings, communicator.transport)
    return _completed(draft, variable_shapes=communicator.variable_shapes, **by_device)


_kept_spec = lru_cache(maxsize=256)(PlanSpec)
_completed = lru_cache(maxsize=256)(replace)


def fields_of_device(settings: StepSettings, transport: Transport) -> dict[str, Any]:
    """The fields of a PlanSpec that depend on what the transport runs on."""
    # One more is pending: a send is posted before the rank waits for the one ``release_after`` operations older.
    after = 1 if transport.pollable else max(1, int(settings.max_pending_sends) - 1)
    device: tuple[str, ...] = ()
    if transport.backend == "nccl":
        from megatron_pp.config.device_rules import device_rules

        device = device_rules(settings)
    return {"release_after": after, "device": device}


def _check_chunks(settings: StepSettings, pipeline_size: int, num_chunks: int, chunked: bool) -> None:
    virtual = settings.virtual_pipeline_model_parallel_size
    if chunked and virtual not in (None, num_chunks):
        raise ScheduleInputError(
            f"{num_chunks} model chunks were given, but config.virtual_pipeline_model_parallel_size is {virtual}; "
            "they must be equal"
        )
    if pipeline_size == 1:
        return
    if num_chunks == 1 and (virtual or 1) > 1:
        raise ScheduleInputError(
            f"one model was given, but config.virtual_pipeline_model_parallel_size is {virtual}; give a list of "
            f"{virtual} model chunks to forward_backward_pipelining_with_interleaving"
        )
    dtype: Any = settings.pipeline_dtype
    if not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
        raise ScheduleInputError(
            f"config.pipeline_dtype is {dtype!r}; set it to the dtype of the activations between stages, such as "
            "torch.bfloat16"
        )


def warn_of_limits(plan: Plan, splits_as_asked: bool) -> None:
    """Warn, once each, of a microbatch count that leaves a bubble, and of settings under which another plan than the
    schedule's own runs. ``splits_as_asked``: the model splits its backwards, or the user wants them whole."""
    spec, family = plan.spec, find_family(plan.spec.schedule)
    if spec.pipeline_size > 1 and spec.num_parts == 1:
        grouped = spec.num_chunks if family.idles_in_short_groups else 1
        sizes = spec.num_microbatches, spec.pipeline_size, grouped, spec.group_size or spec.pipeline_size
        if not rules.runs_at_full_speed(*sizes):
            from megatron_pp.config.microbatch_counts import slow_count

            warn_once(slow_count(*sizes))
    if plan.remark:
        warn_once(plan.remark)
    if spec.device and not spec.may_wait and spec.pipeline_size > 1:
        warn_once(
            "config.device_sync is False: receives are posted ahead of operations that may wait for an idle device "
            "(the first launch of a kernel, a compilation, an allocation that gives cached blocks back), and two ranks "
            "that wait so at the same time hang; leave it None unless no operation of the model ever waits"
        )
    if not splits_as_asked and family.splits_weight and spec.pipeline_size > 1:  # one rank has no bubble to fill
        warn_once(
            f"schedule {family.name} splits backwards, but the model is not converted: convert its chunks with "
            "megatron_pp.weight_grad.split_weight_grad"
        )


def certify_once(plan: Plan) -> None:
    """Log once per process, as information, what ``verify`` has proven of ``plan`` and, if the plan was searched for
    measured times, its predicted step."""
    if logger.isEnabledFor(logging.INFO):
        log_once(logging.INFO, f"{plan.spec.describe()}: {plan.certificate}")
        if plan.spec.measured is not None:
            log_once(logging.INFO, load("prediction").predicted(plan.spec))
