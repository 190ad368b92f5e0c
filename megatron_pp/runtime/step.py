"""One call of a schedule function, from its arguments to the reported losses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.config.settings import LAYER_GRAPHS, StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import describe_step, guarded, instruction_marks
from megatron_pp.on_demand import is_loaded, load
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.lower.syncs import last_reentry, prepares_in_forward
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime import plan_choice
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.chunk_places import check_places, describe_layers
from megatron_pp.runtime.communicators import communicator_for, lone_communicator, pipeline_group
from megatron_pp.runtime.compute import StepOptions
from megatron_pp.runtime.executor import Feature, PlanExecutor
from megatron_pp.runtime.gradient_hooks import SyncHooks, finalize_gradients, unsynchronised
from megatron_pp.runtime.log_once import certify_once, warn_once
from megatron_pp.runtime.message_shapes import Shapes, group_sizes, messages, tensor_shapes
from megatron_pp.tracing.observers import Observer, Recording, StepObserver, message_bytes, nested, ranges_if_profiling

if TYPE_CHECKING:
    from megatron_pp.runtime.model_steps import ModelSteps
    from megatron_pp.weight_grad.store import WeightGradStore

_OBSERVED = ("trace_dir", "measure", "microbatch_costs")
"""Settings that add an observer to the step."""


def executor_for(communicator: P2PCore) -> type[PlanExecutor]:
    """The engine for a communicator: with a watch on memory where ``config.p2p_debug`` was set when it was made."""
    return PlanExecutor if communicator.wire is None else load("p2p_debug").WatchedExecutor


def features_of(
    plan: Plan,
    communicator: P2PCore,
    chunks: Sequence[Any],
    steps: Any,
    shapes: Sequence[Shapes],
    slices: Sequence[int] = (),
    graph_in_evaluation: bool = False,
    pair_function: Any = None,
) -> list[Feature]:
    """What runs instructions of the plan that are not the engine's own, from the innermost to the outermost. ``shapes``
    are those of each slice, ``slices`` their lengths in tokens; empty where sequences are whole."""
    found: list[Feature] = []
    spec, runner = plan.spec, load("slices").SliceRunner(plan, slices) if slices else None
    if spec.skip_tensors:
        graphs = graph_in_evaluation or not spec.forward_only
        found.append(load("skip_tensors").SkipRunner(plan, [one.send for one in shapes], communicator.dtype, graphs))
    if keys := plan.offloaded(communicator.rank):
        shared = None if runner is None else runner.shared
        found.append(load("offload").Offloads(communicator.host_copies, keys, chunks, shared))
    if runner is not None:
        found.append(runner)
    if plan.placement.barriers:
        layer = load("output_layer").OutputLayerRunner
        found.append(layer(plan.placement, communicator, steps, spec.forward_only))
    if spec.fsdp_collectives:
        found.append(load("fsdp").FsdpRunner(plan, communicator.rank, chunks))
    if spec.overlap_pairs:
        found.append(load("pairs").PairRunner(pair_function, chunks))
    return found


class StepCall:
    """One call of a schedule function: arguments checked when made, the step executed by ``run``.

    ``arguments`` are those of ``get_forward_backward_func``; ``chunked``: lists of model chunks and data iterators;
    ``alone``: without a pipeline. Raises ScheduleInputError before any communication. A plug-in for another training
    stack overrides ``read_settings``, ``weight_store``, ``tensor_shapes``, ``begin``, ``make_steps`` and ``finish``;
    with ``followed_by``, what its training loop does with other ranks between steps, in words, that is watched for
    failures too."""

    followed_by = ""
    graph_in_evaluation = False  # whether evaluation leaves autograd as the caller has it, or builds no graph
    local = False  # whether ranks of a pipeline may each make a call without one, as for a teacher
    whole_by_choice = False  # whether chunks that do not split their backwards are so by the user's setting

    @property
    def joins_pairs(self) -> bool:
        """Whether what ``make_steps`` makes runs a forward and a backward as one (``forward_and_backward``)."""
        return False

    def __init__(self, *, chunked: bool, alone: bool, **arguments: Any) -> None:
        self.alone = alone
        self.inputs = inputs = StepInputs(chunked, **arguments)
        self.config = inputs.config
        self.settings = settings = self.read_settings()
        self.number = self.step_number()
        self.tp_size, self.cp_size = group_sizes(inputs.pg_collection, settings)
        if inputs.adjust_tensor_shapes_fn is not None and (chunked or alone):
            raise ScheduleInputError("adjust_tensor_shapes_fn is for pipelines with one model chunk a rank")
        group = pipeline_group(inputs, alone)
        size = 1 if group is None else group.size()
        if alone and size > 1 and self.local:
            group, size, inputs.p2p_communicator = None, 1, None
            self.settings = settings = settings._replace(**dict.fromkeys(("pipeline_schedule", *_OBSERVED)))
        if alone and size > 1:
            raise ScheduleInputError(
                f"forward_backward_no_pipelining was called in a pipeline of {size} ranks; call what "
                f"get_forward_backward_func({size}) returns"
            )
        self.weights = self.weight_store()
        if self.weights is not None and not inputs.forward_only:
            load("weight_grad").check_wrappers(self.weights, inputs.chunks)
        fields = plan_choice.spec_fields(inputs, settings, size, self.weights is not None, self.joins_pairs)
        self.messages = messages(inputs, settings, size, self.tensor_shapes)
        self.shapes: tuple[Shapes, ...] = (self.messages.shapes,)
        self.slices: tuple[int, ...] = ()  # their lengths in tokens, where sequences are cut
        if settings.sequence_slices > 1:
            cut = load("slice_lengths").cut(inputs, settings, self.tp_size, self.cp_size, self.messages.shapes)
            self.slices, self.shapes = cut
        self.check_output_layer(fields["schedule"])
        if fields["skip_tensors"]:
            load("skip_tensors").check_skip_tensors(fields["skip_tensors"], inputs, settings)
        self.fields = fields
        self.observers = self._observers()
        self.microbatch_costs = () if inputs.forward_only else settings.given_microbatch_costs(inputs.num_microbatches)
        # From here on there may be communication: on NCCL, a new communicator is made by all ranks together.
        self.communicator = self._communicator(group)
        self.spec = plan_choice.plan_spec(fields, settings, self.communicator)

    def run(self) -> list[Any]:
        """The whole step. Returns what the loss function reported."""
        self.begin()
        plan = self._plan()
        steps = self.make_steps(plan)
        first, dtype = self.shapes[0], self.communicator.dtype
        sent, received = message_bytes(first.send, dtype), message_bytes(first.receive, dtype)
        watching = [one for observer in self.observers for one in observer.observers(self, plan, sent)]
        executor = self._executor(plan, steps, watching, max(sent, received))
        for observer in self.observers:
            observer.watch(executor)
        recordings = [one for one in watching if isinstance(one, Recording)]
        edges, collectives = plan.placement.rank_edges, plan.placement.barriers > 0
        with self._guarded(executor, plan) as guard:
            self._check_places(plan)
            self.communicator.prepare(edges, received, sent, batched=self.spec.grouped, collectives=collectives)
            for recording in recordings:
                recording.start()
            executor.run()
            for recording in recordings:
                recording.finish()
            if guard is not None:
                guard.phase("the work after the plan (gradient synchronisation and finalisation)")
            self.finish(steps)
            for observer in self.observers:
                observer.after_step(self, plan, guard)
        return steps.record.data

    def _observers(self) -> list[StepObserver]:
        """The observers that settings ask for."""
        asked = [name for name in ("trace_dir", "measure") if getattr(self.settings, name)]
        if self.settings.microbatch_costs is not None:
            asked.append("microbatch_costs")
        if self.settings.cuda_graph_impl in LAYER_GRAPHS or self.settings.fine_grained_activation_offloading:
            asked.append("megatron_order")
        found = (load(name).step_observer(self) for name in asked)
        return [one for one in found if one is not None]

    def _plan(self) -> Plan:
        """The verified plan that the step runs; what there is to say of it is logged once."""
        plan, training = build_plan(self.spec, self._announce), not self.spec.forward_only
        certify_once(plan)
        if training:
            plan_choice.warn_of_limits(plan, self.weights is not None or self.whole_by_choice)
            synchronised = self.communicator.pp_group, self.inputs.pg_collection
            for sentence in unsynchronised(self.settings, self.inputs.chunks, plan.placement, *synchronised):
                self._announce(sentence)
        if self.communicator.transport.backend == "nccl":
            advice = load("queue_advice").advice_on_queues(plan, self.settings, self.communicator, self.inputs.chunks)
            if advice is not None:
                self._announce(advice)
        for observer in self.observers:
            plan = observer.next_plan(self, plan)
        return plan

    def _guarded(self, executor: PlanExecutor, plan: Plan) -> AbstractContextManager[Any]:
        # Traced steps begin, and measured ones end, with messages that all ranks have to take part in.
        chosen = self.settings.traced_steps, self.settings.measure, self.settings.microbatch_costs is not None
        wired = self.communicator.wire is not None
        agreed = plan.spec, self.shapes, chosen, self.communicator.dtype, wired, self.packs
        step = executor, agreed, partial(self.describe, plan), self.number, self.followed_by
        return guarded(self.communicator, self.settings, *step)

    def _check_places(self, plan: Plan) -> None:
        """Under the guard, so that peers read which rank has a wrong chunk, and before any communication."""
        where = plan.placement, self.communicator.rank, self.spec.schedule
        check_places(self.inputs.chunks, *where, self._announce)

    def _layers(self, plan: Plan) -> dict[str, str]:
        return describe_layers(self.inputs.chunks, plan.placement, self.communicator.rank)

    def describe(self, plan: Plan) -> dict[str, str]:
        """What all ranks of the pipeline have to agree on, as text; compared when it changes."""
        traced = self.settings.traced_steps
        described = {
            "p2p_debug": str(self.communicator.wire is not None),
            **describe_step(plan.spec, self.shapes[0], self.communicator.dtype),
            "tracing (trace_dir, trace_steps)": f"steps {traced}" if traced else "off",
            "measure": str(self.settings.measure),
            "microbatch_costs": "none" if self.settings.microbatch_costs is None else "given",
        }
        if self.packs:
            described["packs of the microbatches, in their order"] = self.packs
        described |= self._layers(plan)
        for observer in self.observers:
            described |= observer.description(plan, self.weights is not None)
        return described

    @property
    def packs(self) -> str:
        """What the microbatches of a training step of packed sequences hold, as a digest; "" for other steps."""
        digest = None if self.inputs.forward_only else getattr(self.settings.microbatch_costs, "digest", None)
        return "" if digest is None else digest()

    def read_settings(self) -> StepSettings:
        return StepSettings.from_config(self.config)

    def check_output_layer(self, schedule: str) -> None:
        """Raises ScheduleInputError where model and schedule do not agree on whether the output layer is split."""
        barriers = find_family(schedule).barriers
        if barriers or is_loaded("output_layer"):
            load("output_layer").check_split_layer(self.inputs, schedule, barriers, self.messages)

    def weight_store(self) -> WeightGradStore | None:
        """The store of this rank's chunks, None where they are not converted."""
        return load("weight_grad").store_of(self.inputs.chunks) if is_loaded("weight_grad") else None

    def tensor_shapes(self) -> tuple[list[Any], list[Any]]:
        """Shapes of the tensors that this rank receives and sends, one per tensor, before
        ``adjust_tensor_shapes_fn``."""
        inputs = self.inputs
        lengths = inputs.seq_length, inputs.micro_batch_size, inputs.decoder_seq_length
        shapes = tensor_shapes(*lengths, self.settings, self.tp_size, self.cp_size)
        return shapes, list(shapes)

    def step_number(self) -> int | None:
        """The program's own number of this step, which all ranks compare; None where it gives none."""
        return self.settings.given_step_number()

    def begin(self) -> None:
        timers = self.settings.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=self.settings.barrier_with_L1_time)

    def make_steps(self, plan: Plan) -> Any:
        """What runs a microbatch through a chunk: a ``Steps`` with the ``record`` of a ModelSteps."""
        inputs, options = self.inputs, self.step_options(plan)
        kind: type[ModelSteps] = load("model_steps").ModelSteps
        if plan.placement.barriers:
            kind = load("output_layer").OutputLayerSteps
        elif self.slices:
            kind = load("slices").SlicedSteps
        return kind(inputs.forward_step_func, inputs.data_iterators, inputs.chunks, self.settings, options)

    def finish(self, steps: Any) -> None:
        """After the last instruction: gradients are finalised, the timer stops."""
        inputs, tokens, device = self.inputs, steps.record.num_tokens, self.communicator.device
        if not inputs.forward_only:
            more = inputs.pg_collection, inputs.force_all_reduce
            finalize_gradients(self.settings, inputs.chunks, tokens, device, *more)
        self.stop_timer()

    def stop_timer(self) -> None:
        if self.settings.timers is not None:
            self.settings.timers("forward-backward").stop()

    def step_options(self, plan: Plan) -> StepOptions:
        inputs, rank = self.inputs, self.communicator.rank
        partial = self.settings.num_microbatches_with_partial_activation_checkpoints
        flags = None  # Megatron's schedule without a pipeline passes no such flag
        if partial is not None and not self.alone:
            flags = load("partial_checkpoints").checkpoint_flags(partial, plan.orders[rank], inputs.forward_only)
        whole_sequence = None
        if self.cp_size > 1 and not inputs.forward_only and not self.settings.calculate_per_token_loss:
            whole_sequence = load("context_parallel_loss").WholeSequence(inputs.pg_collection, self.cp_size)
        return StepOptions(
            num_microbatches=inputs.num_microbatches,
            is_last_stage=self._is_last_stage(plan),
            device_type=self.communicator.device.type,
            cp_size=self.cp_size,
            forward_only=inputs.forward_only,
            collect_non_loss_data=inputs.collect_non_loss_data,
            first_val_step=inputs.first_val_step,
            checkpoint_flags=flags,
            whole_sequence=whole_sequence,
        )

    def _communicator(self, group: Any) -> P2PCore:
        given = self.inputs.p2p_communicator
        if isinstance(given, P2PCore):
            return given
        if group is not None:
            return communicator_for(group, self.settings)
        return lone_communicator(self.settings, self.inputs.chunks[0])

    def _executor(self, plan: Plan, steps: Any, watching: Sequence[Observer], message_bytes: float) -> PlanExecutor:
        settings, chunks, (_, received, sent) = self.settings, self.inputs.chunks, self.messages
        rank = self.communicator.rank
        if received is not None or sent is not None:  # the stages give each other dicts
            steps = load("named_tensors").NamedSteps(steps, received, sent, self._is_last_stage(plan))
        return executor_for(self.communicator)(
            plan,
            self.communicator,
            steps,
            SyncHooks(settings, chunks, not prepares_in_forward(plan, rank), last_reentry(plan, rank)),
            self.shapes,
            deallocate=settings.deallocate_pipeline_outputs,
            max_pending_sends=settings.max_pending_sends,
            message_bytes=0 if plan.spec.skip_tensors else message_bytes,
            weights=self.weights,
            graph_in_evaluation=self.graph_in_evaluation,
            features=self._features(plan, steps),
            observer=nested(instruction_marks(self.communicator, settings), *watching, ranges_if_profiling()),
        )

    def _features(self, plan: Plan, steps: Any) -> list[Feature]:
        graphs, pair_function = self.graph_in_evaluation, self.settings.overlapped_forward_backward
        run = plan, self.communicator, self.inputs.chunks, steps
        return features_of(*run, self.shapes, self.slices, graphs, pair_function)

    def _is_last_stage(self, plan: Plan) -> list[bool]:
        rank = self.communicator.rank
        return [plan.placement.is_last_stage(rank, chunk) for chunk in range(len(self.inputs.chunks))]

    def _announce(self, message: str) -> None:
        """Log ``message`` once per job."""
        if self.communicator.transport.global_rank(self.communicator.rank) == 0:
            warn_once(message)
