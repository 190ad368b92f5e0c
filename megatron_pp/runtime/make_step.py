"""Makes the step of a call: its settings and arguments are checked, and its communicator and plan are looked up or
made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.config.settings import LAYER_GRAPHS, StepSettings, checked
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import shared_values
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.lower.syncs import last_reentry, prepares_in_forward
from megatron_pp.runtime import plan_choice
from megatron_pp.runtime.arguments import group_sizes, pipeline_group
from megatron_pp.runtime.communicators import communicator_for
from megatron_pp.runtime.engine.compute import Shapes
from megatron_pp.runtime.host import Host
from megatron_pp.runtime.message_shapes import messages
from megatron_pp.runtime.step import PlanRequest, RankPlan, Step, StepRequest
from megatron_pp.runtime.step_features import step_hooks
from megatron_pp.tracing.observers import message_bytes

if TYPE_CHECKING:
    from megatron_pp.tracing.step_observer import StepObserver


def made_step(host: Host, settings: StepSettings) -> Step:
    """The step of a call that reads ``settings``. Raises ScheduleInputError for impossible arguments before any
    communication."""
    host.check_settings(settings)
    inputs, alone = host.inputs, host.alone
    number = host.step_number(settings)
    tp_size, cp_size = group_sizes(inputs.pg_collection, settings)
    if inputs.adjust_tensor_shapes_fn is not None and (inputs.chunked or alone):
        raise ScheduleInputError("adjust_tensor_shapes_fn is for pipelines with one model chunk a rank")
    group = pipeline_group(inputs, alone)
    size = 1 if group is None else group.size()
    if alone and size > 1:
        from megatron_pp.runtime.alone import in_a_pipeline

        settings = in_a_pipeline(host, settings, size)
        group, size = None, 1
    weights = host.weight_store(settings)
    if weights is not None and not inputs.forward_only:
        from megatron_pp import weight_grad

        weight_grad.check_wrappers(weights, inputs.chunks)
    draft = plan_choice.draft_spec(inputs, settings, size, weights is not None, host.joins)
    added = step_hooks(draft)
    for hooks in added:
        hooks.check_draft(draft, inputs, settings)
    wanted = messages(inputs, settings, size, partial(host.tensor_shapes, settings, tp_size, cp_size))
    shapes: tuple[Shapes, ...] = (wanted.shapes,)
    lengths: tuple[int, ...] = ()
    for hooks in added:
        lengths, shapes = hooks.cut(inputs, settings, tp_size, cp_size, wanted.shapes) or (lengths, shapes)
    for hooks in added:
        hooks.check(draft, inputs, settings, wanted)
    costs: tuple[float, ...] = ()
    if settings.microbatch_costs is not None and not inputs.forward_only:
        from megatron_pp.config.measured_values import costs_of_step

        costs = checked(costs_of_step, settings.microbatch_costs, inputs.num_microbatches)
    request = StepRequest(
        inputs, settings, alone, number, cp_size, weights, host.joins, draft, wanted, shapes, lengths, costs
    )
    observers = observers_of(request)
    # From here on there may be communication: on NCCL, a new communicator is made by all ranks together.
    communicator = communicator_of(request, group)
    spec = plan_choice.plan_spec(draft, settings, communicator)
    return planned(host, PlanRequest(**vars(request), observers=observers, communicator=communicator, spec=spec))


def planned(host: Host, asked: PlanRequest) -> Step:
    """The step with the plan that is ``asked`` for."""
    host.check(asked)
    return Step(**vars(asked), of_rank=rank_plan(host, asked, host.plan(asked)))


def rank_plan(host: Host, asked: PlanRequest, plan: Plan) -> RankPlan:
    """``plan`` as this rank runs it in the step that is ``asked`` for."""
    settings, communicator, rank = asked.settings, asked.communicator, asked.communicator.rank
    some, flags = settings.num_microbatches_with_partial_activation_checkpoints, None
    if some is not None and not asked.alone:  # Megatron's schedule without a pipeline passes no such flag
        from megatron_pp.runtime import partial_checkpoints

        flags = partial_checkpoints.checkpoint_flags(some, plan.orders[rank], asked.inputs.forward_only)
    first, dtype = asked.shapes[0], communicator.dtype
    received, sent = message_bytes(first.receive, dtype), message_bytes(first.send, dtype)
    # Traced steps begin, and measured ones end, with messages that all ranks have to take part in.
    chosen = settings.traced_steps, settings.measure, settings.microbatch_costs is not None
    return RankPlan(
        plan,
        plan.tasks(rank),
        is_last_stage=host.is_last_stage(asked, plan),
        checkpoint_flags=flags,
        prepares_in_forward=prepares_in_forward(plan, rank),
        last_reentry=last_reentry(plan, rank),
        received=received,
        sent=sent,
        largest=0 if plan.has_names else max(received, sent),
        grouped=plan.spec.grouped,
        has_features=host.has_features(plan),
        agreed=(shared_values(plan.spec), asked.shapes, chosen, dtype, communicator.wire is not None, asked.packs),
    )


def observers_of(request: StepRequest) -> list[StepObserver]:
    """The observers that settings ask for."""
    settings = request.settings
    asked = []
    if settings.trace_dir:
        from megatron_pp.tracing.recorder import step_observer

        asked.append(step_observer)
    asked += [load(name).step_observer for name in ("measure", "metrics") if getattr(settings, name)]
    if settings.microbatch_costs is not None:
        asked.append(load("microbatch_costs").step_observer)
    if settings.cuda_graph_impl in LAYER_GRAPHS or settings.fine_grained_activation_offloading:
        asked.append(load("megatron_order").step_observer)
    if not asked:
        return []
    from megatron_pp.tracing.step_observer import StepObserver

    return [make(request) or StepObserver() for make in asked]


def communicator_of(request: StepRequest, group: Any) -> P2PCore:
    """The caller's, or that of ``group``; None is a rank alone."""
    given = request.inputs.p2p_communicator
    if isinstance(given, P2PCore):
        return given
    if group is not None:
        return communicator_for(group, request.settings)
    from megatron_pp.runtime.alone import lone_communicator

    return lone_communicator(request.settings, request.inputs.chunks[0])
