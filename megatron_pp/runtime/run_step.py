"""One call of a schedule function: its step is prepared (``prepared``), and then run (``run_step``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.faults.attach import describe_step, guard_of, guarded
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.runtime import kept_calls
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.engine.gradient_hooks import SyncHooks
from megatron_pp.runtime.host import Host
from megatron_pp.runtime.make_step import made_step, rank_plan
from megatron_pp.runtime.step import Step
from megatron_pp.tracing.observers import Observer, Recording, nested


def prepared(host: Host) -> Step:
    """The step of a call: what an earlier call has found, else made anew. Raises ScheduleInputError for impossible
    arguments before any communication."""
    settings = host.read_settings()
    return kept_calls.taken_over(host, settings) or made_step(host, settings)


def run_step(step: Step, host: Host) -> list[Any]:
    """The whole step. Returns what the loss function reported. Raises ScheduleInputError within another such step."""
    transport = step.communicator.transport
    if transport.in_step:
        from megatron_pp.runtime import step_in_step

        raise step_in_step.error(transport.rank)
    transport.in_step = transport.size > 1
    try:
        return _run(step, host)
    finally:
        transport.in_step = False


def _run(step: Step, host: Host) -> list[Any]:
    communicator, observers, plan = step.communicator, step.observers, step.of_rank.plan
    to_keep = None if step.is_known else kept_calls.to_keep(host, step)
    host.begin(step)
    for observer in observers:
        plan = observer.next_plan(step, plan)
    if plan is not step.of_rank.plan:
        step = replace(step, of_rank=rank_plan(host, step, plan))
    received, sent = step.of_rank.received, step.of_rank.sent
    steps = host.steps(step, plan)
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


def _executor(step: Step, host: Host, plan: Plan, steps: Any, watching: Sequence[Observer | None]) -> PlanExecutor:
    settings, communicator, of_rank = step.settings, step.communicator, step.of_rank
    _, received, sent = step.messages
    if received is not None or sent is not None:  # the stages give each other dicts
        steps = load("named_tensors").NamedSteps(steps, received, sent, of_rank.is_last_stage)
    features = host.features(step, plan, steps)
    if step.weights is not None and not plan.spec.forward_only:
        from megatron_pp.runtime.engine.split_backwards import SplitBackwards

        features = [SplitBackwards(step.weights), *features]
    return executor_for(communicator)(
        plan,
        communicator,
        steps,
        SyncHooks(settings, step.inputs.chunks, not of_rank.prepares_in_forward, of_rank.last_reentry),
        step.shapes,
        deallocate=settings.deallocate_pipeline_outputs,
        max_pending_sends=settings.max_pending_sends,
        message_bytes=of_rank.largest,
        graph_in_evaluation=host.graph_in_evaluation,
        features=features,
        tasks=of_rank.tasks,
        observer=nested(*watching) if any(watching) else None,
    )


def executor_for(communicator: P2PCore) -> type[PlanExecutor]:
    """The engine for a communicator: with a watch on memory where ``config.p2p_debug`` was set when it was made."""
    return PlanExecutor if communicator.wire is None else load("p2p_debug").WatchedExecutor


def _description(step: Step, host: Host, plan: Plan) -> dict[str, str]:
    """The values that all ranks of the pipeline must agree on, as text; compared when they change."""
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
