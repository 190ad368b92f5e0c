"""One call of a schedule function: its step is prepared (``prepared``), and then run (``run_step``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.config.settings import LAYER_GRAPHS, StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import describe_step, guarded, instruction_marks
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.lower.syncs import last_reentry, prepares_in_forward
from megatron_pp.runtime import plan_choice
from megatron_pp.runtime.communicators import communicator_for, pipeline_group
from megatron_pp.runtime.compute import StepOptions
from megatron_pp.runtime.executor import PlanExecutor
from megatron_pp.runtime.gradient_hooks import SyncHooks
from megatron_pp.runtime.host import Host
from megatron_pp.runtime.message_shapes import Shapes, group_sizes, messages
from megatron_pp.runtime.step import Step, StepRequest
from megatron_pp.runtime.step_features import step_hooks
from megatron_pp.tracing.observers import Observer, Recording, message_bytes, nested, ranges_if_profiling

if TYPE_CHECKING:
    from megatron_pp.tracing.step_observer import StepObserver

_OBSERVED = ("trace_dir", "measure", "metrics", "microbatch_costs")
"""Settings that add an observer to the step."""


def prepared(host: Host) -> Step:
    """The step of a call. Raises ScheduleInputError for impossible arguments before any communication."""
    inputs, alone, settings = host.inputs, host.alone, host.read_settings()
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
    costs = () if inputs.forward_only else settings.given_microbatch_costs(inputs.num_microbatches)
    request = StepRequest(
        inputs, settings, alone, number, cp_size, weights, host.joins, draft, wanted, shapes, lengths, costs
    )
    observers = observers_of(request)
    # From here on there may be communication: on NCCL, a new communicator is made by all ranks together.
    communicator = communicator_of(request, group)
    spec = plan_choice.plan_spec(draft, settings, communicator)
    return Step(**vars(request), observers=observers, communicator=communicator, spec=spec)


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
    found = (make(request) for make in asked)
    return [one for one in found if one is not None]


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
    communicator, observers = step.communicator, step.observers
    host.begin(step)
    plan = host.plan(step)
    for observer in observers:
        plan = observer.next_plan(step, plan)
    steps = host.steps(step, plan, _options(step, host, plan))
    first, dtype = step.shapes[0], communicator.dtype
    sent, received = message_bytes(first.send, dtype), message_bytes(first.receive, dtype)
    watching = [one for observer in observers for one in observer.observers(step, plan, sent)]
    executor = _executor(step, host, plan, steps, watching, max(sent, received))
    for observer in observers:
        observer.watch(executor)
    recordings = [one for one in watching if isinstance(one, Recording)]
    edges, collectives = plan.placement.rank_edges, plan.placement.barriers > 0
    with _guarded(step, host, executor, plan) as guard:
        host.check_chunks(step, plan)
        communicator.prepare(edges, received, sent, batched=step.spec.grouped, collectives=collectives)
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
    data: list[Any] = steps.record.data
    return data


def _options(step: Step, host: Host, plan: Plan) -> StepOptions:
    inputs, settings, communicator = step.inputs, step.settings, step.communicator
    some = settings.num_microbatches_with_partial_activation_checkpoints
    flags = None  # Megatron's schedule without a pipeline passes no such flag
    if some is not None and not step.alone:
        order = plan.orders[communicator.rank]
        from megatron_pp.runtime import partial_checkpoints

        flags = partial_checkpoints.checkpoint_flags(some, order, inputs.forward_only)
    whole_sequence = None
    if step.cp_size > 1 and not inputs.forward_only and not settings.calculate_per_token_loss:
        from megatron_pp.runtime.context_parallel_loss import WholeSequence

        whole_sequence = WholeSequence(inputs.pg_collection, step.cp_size)
    return StepOptions(
        num_microbatches=inputs.num_microbatches,
        is_last_stage=host.is_last_stage(step, plan),
        device_type=communicator.device.type,
        cp_size=step.cp_size,
        forward_only=inputs.forward_only,
        collect_non_loss_data=inputs.collect_non_loss_data,
        first_val_step=inputs.first_val_step,
        checkpoint_flags=flags,
        whole_sequence=whole_sequence,
    )


def _executor(
    step: Step, host: Host, plan: Plan, steps: Any, watching: Sequence[Observer], message_bytes: float
) -> PlanExecutor:
    settings, communicator, chunks = step.settings, step.communicator, step.inputs.chunks
    _, received, sent = step.messages
    if received is not None or sent is not None:  # the stages give each other dicts
        steps = load("named_tensors").NamedSteps(steps, received, sent, host.is_last_stage(step, plan))
    return executor_for(communicator)(
        plan,
        communicator,
        steps,
        hooks_of(plan, communicator.rank, settings, chunks),
        step.shapes,
        deallocate=settings.deallocate_pipeline_outputs,
        max_pending_sends=settings.max_pending_sends,
        message_bytes=0 if plan.has_names else message_bytes,
        weights=step.weights,
        graph_in_evaluation=host.graph_in_evaluation,
        features=host.features(step, plan, steps),
        observer=nested(instruction_marks(communicator, settings), *watching, ranges_if_profiling()),
    )


def hooks_of(plan: Plan, rank: int, settings: StepSettings, chunks: Sequence[Any]) -> SyncHooks:
    """What the gradient and parameter syncs of ``rank`` call."""
    return SyncHooks(settings, chunks, not prepares_in_forward(plan, rank), last_reentry(plan, rank))


def executor_for(communicator: P2PCore) -> type[PlanExecutor]:
    """The engine for a communicator: with a watch on memory where ``config.p2p_debug`` was set when it was made."""
    return PlanExecutor if communicator.wire is None else load("p2p_debug").WatchedExecutor


def _guarded(step: Step, host: Host, executor: PlanExecutor, plan: Plan) -> AbstractContextManager[Any]:
    settings, communicator = step.settings, step.communicator
    # Traced steps begin, and measured ones end, with messages that all ranks have to take part in.
    chosen = settings.traced_steps, settings.measure, settings.microbatch_costs is not None
    agreed = plan.spec, step.shapes, chosen, communicator.dtype, communicator.wire is not None, step.packs
    more = executor, agreed, partial(_description, step, host, plan), step.number, host.followed_by
    return guarded(communicator, settings, *more)


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
