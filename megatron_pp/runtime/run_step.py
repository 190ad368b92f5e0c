"""One call of a schedule function: its step is prepared (``prepared``), and then run (``run_step``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.config.settings import LAYER_GRAPHS, StepSettings, checked
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import describe_step, guard_of, guarded
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.lower.syncs import last_reentry, prepares_in_forward
from megatron_pp.runtime import kept_calls, plan_choice
from megatron_pp.runtime.arguments import group_sizes, pipeline_group
from megatron_pp.runtime.communicators import communicator_for
from megatron_pp.runtime.compute import StepOptions
from megatron_pp.runtime.executor import PlanExecutor
from megatron_pp.runtime.gradient_hooks import SyncHooks
from megatron_pp.runtime.host import Host
from megatron_pp.runtime.message_shapes import Shapes, messages
from megatron_pp.runtime.step import RankPlan, Step, StepRequest
from megatron_pp.runtime.step_features import step_hooks
from megatron_pp.tracing.observers import Observer, Recording, message_bytes, nested

if TYPE_CHECKING:
    from megatron_pp.tracing.step_observer import StepObserver

_OBSERVED = ("trace_dir", "measure", "metrics", "microbatch_costs")
"""Settings that add an observer to the step."""


def prepared(host: Host) -> Step:
    """The step of a call: what an earlier call has found, else made anew. Raises ScheduleInputError for impossible
    arguments before any communication."""
    settings = host.read_settings()
    return kept_calls.taken_over(host, settings) or _made(host, settings)


def _made(host: Host, settings: StepSettings) -> Step:
    host.check_settings(settings)
    inputs, alone = host.inputs, host.alone
    number = host.step_number(settings)
    tp_size, cp_size = group_sizes(inputs.pg_collection, settings)
    if inputs.adjust_tensor_shapes_fn is not None and (inputs.chunked or alone):
        raise ScheduleInputError("adjust_tensor_shapes_fn is for pipelines with one model chunk a rank")
    group = pipeline_group(inputs, alone)
    size = 1 if group is None else group.size()
    if alone and size > 1:
        if not host.local:
            raise ScheduleInputError(
                f"forward_backward_no_pipelining was called in a pipeline of {size} ranks; call what "
                f"get_forward_backward_func({size}) returns"
            )
        group, size, inputs.p2p_communicator = None, 1, None
        defaults: dict[str, Any] = dict.fromkeys(("pipeline_schedule", *_OBSERVED))
        settings = settings._replace(**defaults)
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
    return planned(host, request, observers=observers, communicator=communicator, spec=spec)


def planned(host: Host, request: StepRequest, **found: Any) -> Step:
    """The step of ``request`` with its plan. ``found``: the fields of a Step behind those of a StepRequest."""
    unplanned: Any = None
    step = Step(**vars(request), **found, of_rank=unplanned)
    host.check(step)
    return replace(step, of_rank=_of_rank(step, host, host.plan(step)))


def _of_rank(step: Step, host: Host, plan: Plan) -> RankPlan:
    settings, communicator, rank = step.settings, step.communicator, step.communicator.rank
    some, flags = settings.num_microbatches_with_partial_activation_checkpoints, None
    if some is not None and not step.alone:  # Megatron's schedule without a pipeline passes no such flag
        from megatron_pp.runtime import partial_checkpoints

        flags = partial_checkpoints.checkpoint_flags(some, plan.orders[rank], step.inputs.forward_only)
    first, dtype = step.shapes[0], communicator.dtype
    received, sent = message_bytes(first.receive, dtype), message_bytes(first.send, dtype)
    # Traced steps begin, and measured ones end, with messages that all ranks have to take part in.
    chosen = settings.traced_steps, settings.measure, settings.microbatch_costs is not None
    return RankPlan(
        plan,
        plan.tasks(rank),
        is_last_stage=host.is_last_stage(step, plan),
        checkpoint_flags=flags,
        prepares_in_forward=prepares_in_forward(plan, rank),
        last_reentry=last_reentry(plan, rank),
        received=received,
        sent=sent,
        largest=0 if plan.has_names else max(received, sent),
        grouped=plan.spec.grouped,
        has_features=host.has_features(plan),
        agreed=(plan.spec, step.shapes, chosen, dtype, communicator.wire is not None, step.packs),
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


def run_step(step: Step, host: Host) -> list[Any]:
    """The whole step. Returns what the loss function reported."""
    communicator, observers, plan = step.communicator, step.observers, step.of_rank.plan
    to_keep = None if step.is_known else kept_calls.to_keep(host, step)
    host.begin(step)
    for observer in observers:
        plan = observer.next_plan(step, plan)
    if plan is not step.of_rank.plan:
        step = replace(step, of_rank=_of_rank(step, host, plan))
    received, sent = step.of_rank.received, step.of_rank.sent
    steps = host.steps(step, plan, _options(step))
    watching = [one for observer in observers for one in observer.observers(step, plan, sent)]
    guard = guard_of(communicator, step.settings)
    marks = None if guard is None else guard.marks
    executor = _executor(step, host, plan, steps, [marks, *watching, ranges_if_profiling()])
    for observer in observers:
        observer.watch(executor)
    recordings = [one for one in watching if isinstance(one, Recording)]
    edges, collectives = plan.placement.rank_edges, plan.placement.barriers > 0
    description = partial(_description, step, host, plan)
    with guarded(communicator, guard, executor, step.of_rank.agreed, description, step.number, host.followed_by):
        if not step.is_known:
            host.check_chunks(step, plan)
        communicator.prepare(edges, received, sent, batched=step.of_rank.grouped, collectives=collectives)
        for recording in recordings:
            recording.start()
        executor.run()
        for recording in recordings:
            recording.finish()
        if guard is not None:
            guard.phase("the work after the plan (gradient synchronisation and finalisation)")
        host.finish(step, steps)
        for observer in observers:
            observer.after_step(step, plan, guard)
    if to_keep is not None:
        kept_calls.keep(step.inputs.chunks[0], to_keep)
    data: list[Any] = steps.record.data
    return data


def ranges_if_profiling() -> Observer | None:
    """The observer of the step that starts now; None where no profiler runs. ``torch.profiler.profile`` (also on the
    CPU) and ``torch.autograd.profiler.emit_nvtx`` are detected; for nsys, which torch cannot detect, MEGATRON_PP_NVTX=1
    is set. Called once a step."""
    with_nvtx = os.environ.get("MEGATRON_PP_NVTX") == "1" and torch.cuda.is_available()
    if not with_nvtx and not torch.autograd._profiler_enabled():
        return None
    from megatron_pp.tracing.profiler_ranges import profiler_ranges

    return profiler_ranges()


def _options(step: Step) -> StepOptions:
    inputs = step.inputs
    whole_sequence = None
    if step.cp_size > 1 and not inputs.forward_only and not step.settings.calculate_per_token_loss:
        from megatron_pp.runtime.context_parallel_loss import WholeSequence

        whole_sequence = WholeSequence(inputs.pg_collection, step.cp_size)
    return StepOptions(
        num_microbatches=inputs.num_microbatches,
        is_last_stage=step.of_rank.is_last_stage,
        device_type=step.communicator.device.type,
        cp_size=step.cp_size,
        forward_only=inputs.forward_only,
        collect_non_loss_data=inputs.collect_non_loss_data,
        first_val_step=inputs.first_val_step,
        checkpoint_flags=step.of_rank.checkpoint_flags,
        whole_sequence=whole_sequence,
    )


def _executor(step: Step, host: Host, plan: Plan, steps: Any, watching: Sequence[Observer | None]) -> PlanExecutor:
    settings, communicator, of_rank = step.settings, step.communicator, step.of_rank
    _, received, sent = step.messages
    if received is not None or sent is not None:  # the stages give each other dicts
        steps = load("named_tensors").NamedSteps(steps, received, sent, of_rank.is_last_stage)
    return executor_for(communicator)(
        plan,
        communicator,
        steps,
        SyncHooks(settings, step.inputs.chunks, not of_rank.prepares_in_forward, of_rank.last_reentry),
        step.shapes,
        deallocate=settings.deallocate_pipeline_outputs,
        max_pending_sends=settings.max_pending_sends,
        message_bytes=of_rank.largest,
        weights=step.weights,
        graph_in_evaluation=host.graph_in_evaluation,
        features=host.features(step, plan, steps),
        tasks=of_rank.tasks,
        observer=nested(*watching) if any(watching) else None,
    )


def executor_for(communicator: P2PCore) -> type[PlanExecutor]:
    """The engine for a communicator: with a watch on memory where ``config.p2p_debug`` was set when it was made."""
    return PlanExecutor if communicator.wire is None else load("p2p_debug").WatchedExecutor


def _description(step: Step, host: Host, plan: Plan) -> dict[str, str]:
    """What all ranks of the pipeline have to agree on, as text; compared when it changes."""
    settings, traced = step.settings, step.settings.traced_steps
    described = {
        "p2p_debug": str(step.communicator.wire is not None),
        **describe_step(plan.spec, step.shapes[0], step.communicator.dtype),
        "tracing (trace_dir, trace_steps)": f"steps {traced}" if traced else "off",
        "measure": str(settings.measure),
        "microbatch_costs": "none" if settings.microbatch_costs is None else "given",
    }
    if step.packs:
        described["packs of the microbatches, in their order"] = step.packs
    described |= host.described(step, plan)
    for observer in step.observers:
        described |= observer.description(plan, step.weights is not None)
    return described
