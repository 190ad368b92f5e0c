"""One call of a schedule function, from its arguments to the reported losses."""

from functools import partial
from typing import Any

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.config.settings import TE_GRAPHS, StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import describe_step, guarded, instruction_marks
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import MeasuredStep
from megatron_pp.plan.io.schedule_file import find_family
from megatron_pp.plan.ir.spec import BATCHED, Plan, PlanSpec
from megatron_pp.plan.lower.syncs import last_reentry, prepares_in_forward
from megatron_pp.runtime import plan_choice
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.communicators import communicator_for, lone_communicator, pipeline_group
from megatron_pp.runtime.compute import ModelSteps, NamedSteps, StepOptions
from megatron_pp.runtime.executor import PlanExecutor
from megatron_pp.runtime.gradient_hooks import SyncHooks, finalize_gradients, unsynchronised
from megatron_pp.runtime.graph_order import check_graph_order
from megatron_pp.runtime.log_once import certify_once, warn_once
from megatron_pp.runtime.measuring import measuring_of
from megatron_pp.runtime.message_shapes import group_sizes, messages, shapes_of_slices, slices_of, tensor_shapes
from megatron_pp.runtime.output_layer import OutputLayerRunner, OutputLayerSteps, check_split_layer
from megatron_pp.runtime.pairs import PairRunner
from megatron_pp.runtime.replanning import in_steps, replanning_of
from megatron_pp.runtime.send_buffer_check import executor_for
from megatron_pp.runtime.sequence_slices import SlicedSteps, SliceRunner
from megatron_pp.runtime.skip_tensors import SkipRunner, check_skip_tensors
from megatron_pp.tracing import recorder
from megatron_pp.weight_grad import WeightGradStore, check_wrappers, store_of


class StepCall:
    """One call of a schedule function: arguments checked when made, the step executed by ``run``.

    ``arguments`` are those of ``get_forward_backward_func``; ``chunked``: lists of model chunks and data iterators;
    ``alone``: without a pipeline. Raises ScheduleInputError before any communication. A plug-in for another training
    stack overrides ``read_settings``, ``weight_store``, ``tensor_shapes``, ``begin``, ``make_steps`` and ``finish``;
    with ``followed_by``, what its training loop does with other ranks between steps, in words, that is watched for
    failures too."""

    followed_by = ""
    graph_in_evaluation = False  # whether evaluation leaves autograd as the caller has it, or builds no graph
    whole_by_choice = False  # whether chunks that do not split their backwards are so by the user's setting

    @property
    def joins_pairs(self) -> bool:
        """Whether what ``make_steps`` makes runs a forward and a backward as one (``JointSteps``)."""
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
        if alone and size > 1:
            raise ScheduleInputError(
                f"forward_backward_no_pipelining was called in a pipeline of {size} ranks; call what "
                f"get_forward_backward_func({size}) returns"
            )
        self.weights = self.weight_store()
        if self.weights is not None and not inputs.forward_only:
            check_wrappers(self.weights, inputs.chunks)
        fields = plan_choice.spec_fields(inputs, settings, size, self.weights is not None, self.joins_pairs)
        self.slices = slices_of(inputs, settings, self.tp_size, self.cp_size)
        self.messages = messages(inputs, settings, size, self.tensor_shapes)
        self.check_output_layer(fields["schedule"])
        self.shapes = shapes_of_slices(self.messages.shapes, self.slices)
        if fields["skip_tensors"]:
            check_skip_tensors(fields["skip_tensors"], inputs, settings)
        if settings.cuda_graph_impl == TE_GRAPHS:
            check_graph_order(PlanSpec(**fields), interleaved=settings.virtual_pipeline_model_parallel_size is not None)
        self.measuring = measuring_of(inputs.chunks[0], settings, inputs.forward_only)
        self.replanning = replanning_of(inputs.chunks, settings, fields)
        self.microbatch_costs = settings.given_microbatch_costs(inputs.num_microbatches)
        # From here on there may be communication: on NCCL, a new communicator is made by all ranks together.
        self.communicator = self._communicator(group)
        self.spec = plan_choice.plan_spec(fields, settings, self.communicator)

    def run(self) -> list[Any]:
        """The whole step. Returns what the loss function reported."""
        self.begin()
        communicator, shapes = self.communicator, self.shapes[0]
        plan = build_plan(self.spec, self._announce)
        certify_once(plan)
        if not self.spec.forward_only:
            plan_choice.warn_of_limits(plan, self.weights is not None or self.whole_by_choice)
            synchronised = self.communicator.pp_group, self.inputs.pg_collection
            for sentence in unsynchronised(self.settings, self.inputs.chunks, plan.placement, *synchronised):
                self._announce(sentence)
        if (advice := plan_choice.advice_on_queues(plan, self.settings, communicator)) is not None:
            self._announce(advice)
        if self.replanning is not None:
            shares = in_steps(self.microbatch_costs) if self.microbatch_costs else ()
            plan = self.replanning.next_plan(plan, communicator, self.settings, self.weights is not None, shares)
        steps = self.make_steps(plan)
        sent = received = recorder.message_bytes(shapes.send, communicator.dtype)
        if shapes.receive != shapes.send:
            received = recorder.message_bytes(shapes.receive, communicator.dtype)
        traced = recorder.step_recording(self.inputs.chunks[0], self.settings, plan, communicator.transport, sent)
        models = communicator.transport, self.inputs.chunks, self.weights
        measured = [] if self.measuring is None else self.measuring.next_step(plan, *models)
        replanned = None if self.replanning is None else self.replanning.recording(plan, sent)
        watching = recorder.observers(traced, *measured, replanned)
        executor = self._executor(plan, steps, watching, max(sent, received))
        if self.measuring is not None:
            self.measuring.watch(executor)
        recordings = [one for one in (traced, *measured, replanned) if isinstance(one, recorder.Recording)]
        # Traced steps begin, and measured ones end, with messages that all ranks have to take part in.
        wired = communicator.wire is not None
        chosen = recorder.traced_steps(self.settings), self.settings.measure, self.settings.pipeline_replan
        agreed = (plan.spec, self.shapes, chosen, communicator.dtype, wired)
        step = executor, agreed, partial(self.describe, plan), self.number, self.followed_by
        with guarded(communicator, self.settings, *step) as guard:
            collectives = plan.placement.barriers > 0
            communicator.prepare(plan.placement.rank_edges, received, sent, self.spec.policy == BATCHED, collectives)
            for recording in recordings:
                recording.start()
            executor.run()
            for recording in recordings:
                recording.finish()
            if guard is not None:
                guard.phase("the work after the plan (gradient synchronisation and finalisation)")
            self.finish(steps)
            if self.measuring is not None:
                if guard is not None:
                    guard.phase("measuring what transfers take (config.measure)")
                self.measuring.after_step(plan, self._measured_run())
        return steps.record.data

    def describe(self, plan: Plan) -> dict[str, str]:
        """What all ranks of the pipeline have to agree on, as text; compared when it changes."""
        traced = recorder.traced_steps(self.settings)
        return {
            "p2p_debug": str(self.communicator.wire is not None),
            **describe_step(plan.spec, self.shapes[0], self.communicator.dtype),
            "tracing (trace_dir, trace_steps)": f"steps {traced}" if traced else "off",
            "measure": str(self.settings.measure),
            "pipeline_replan": str(self.settings.pipeline_replan),
            **({} if self.replanning is None else self.replanning.description(plan, self.weights is not None)),
        }

    def read_settings(self) -> StepSettings:
        return StepSettings.from_config(self.config)

    def check_output_layer(self, schedule: str) -> None:
        """Raises ScheduleInputError where model and schedule do not agree on whether the output layer is split."""
        check_split_layer(self.inputs, schedule, find_family(schedule).barriers, self.messages)

    def weight_store(self) -> WeightGradStore | None:
        """The store of this rank's chunks, None where they are not converted."""
        return store_of(self.inputs.chunks)

    def tensor_shapes(self) -> list[Any]:
        """Shapes of the tensors between stages, one per tensor, before ``adjust_tensor_shapes_fn``."""
        inputs = self.inputs
        lengths = inputs.seq_length, inputs.micro_batch_size, inputs.decoder_seq_length
        return tensor_shapes(*lengths, self.settings, self.tp_size, self.cp_size)

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
        kind = OutputLayerSteps if plan.placement.barriers else SlicedSteps if self.slices else ModelSteps
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
            flags = plan_choice.checkpoint_flags(partial, plan.orders[rank], inputs.forward_only)
        return StepOptions(
            num_microbatches=inputs.num_microbatches,
            is_last_stage=self._is_last_stage(plan),
            device_type=self.communicator.device.type,
            cp_size=self.cp_size,
            forward_only=inputs.forward_only,
            collect_non_loss_data=inputs.collect_non_loss_data,
            first_val_step=inputs.first_val_step,
            checkpoint_flags=flags,
        )

    def _measured_run(self) -> MeasuredStep:
        spec, inputs = self.spec, self.inputs
        return MeasuredStep(
            schedule=spec.schedule,
            pipeline_size=spec.pipeline_size,
            num_chunks=spec.num_chunks,
            num_microbatches=spec.num_microbatches,
            micro_batch_size=inputs.micro_batch_size,
            seq_length=inputs.seq_length,
        )

    def _communicator(self, group: Any) -> P2PCommunicator:
        given = self.inputs.p2p_communicator
        if isinstance(given, P2PCommunicator):
            return given
        if group:
            return communicator_for(group, self.settings)
        return lone_communicator(self.settings, self.inputs.chunks[0])

    def _executor(
        self, plan: Plan, steps: Any, recording: recorder.Observer | None, message_bytes: float
    ) -> PlanExecutor:
        settings, chunks, (_, received, sent) = self.settings, self.inputs.chunks, self.messages
        rank = self.communicator.rank
        if received is not None or sent is not None:  # the stages give each other dicts
            steps = NamedSteps(steps, received, sent, self._is_last_stage(plan))
        pairs, skips, output_layer = settings.overlapped_forward_backward, None, None
        if plan.spec.skip_tensors:
            graphs = self.graph_in_evaluation or not plan.spec.forward_only
            skips = SkipRunner(plan, [one.send for one in self.shapes], self.communicator.dtype, graphs)
        if plan.placement.barriers:
            output_layer = OutputLayerRunner(plan.placement, self.communicator, steps, plan.spec.forward_only)
        executor = executor_for(self.communicator)(
            plan,
            self.communicator,
            steps,
            SyncHooks(settings, chunks, not prepares_in_forward(plan, rank), last_reentry(plan, rank)),
            self.shapes[0],
            deallocate=settings.deallocate_pipeline_outputs,
            max_pending_sends=settings.max_pending_sends,
            message_bytes=0 if skips is not None else message_bytes,
            weights=self.weights,
            pair_runner=None if pairs is None else PairRunner(pairs, chunks),
            graph_in_evaluation=self.graph_in_evaluation,
            slices=SliceRunner(plan, self.slices, self.shapes) if self.slices else None,
            output_layer=output_layer,
            skips=skips,
            observer=recorder.observers(
                instruction_marks(self.communicator, settings), recording, recorder.ranges_if_profiling()
            ),
        )
        if self.communicator.wire is not None:
            self.communicator.wire.source = executor
        return executor

    def _is_last_stage(self, plan: Plan) -> list[bool]:
        rank = self.communicator.rank
        return [plan.placement.is_last_stage(rank, chunk) for chunk in range(len(self.inputs.chunks))]

    def _announce(self, message: str) -> None:
        """Log ``message`` once per job."""
        if self.communicator.transport.global_rank(self.communicator.rank) == 0:
            warn_once(message)
