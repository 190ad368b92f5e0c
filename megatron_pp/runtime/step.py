"""One call of a schedule function, from its arguments to the reported losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_pp.comm import process_groups as parallel_state
from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import describe_step, guarded
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.spec import Plan
from megatron_pp.plan.sync_marks import prepares_in_forward
from megatron_pp.runtime.communicators import communicator_for, lone_communicator
from megatron_pp.runtime.compute import ModelSteps, StepOptions
from megatron_pp.runtime.dict_activations import NamedSteps, names_of, shapes_of
from megatron_pp.runtime.executor import Shapes
from megatron_pp.runtime.finalize import finalize_gradients
from megatron_pp.runtime.gradient_hooks import SyncHooks
from megatron_pp.runtime.pairs import PairRunner
from megatron_pp.runtime.send_buffer_check import executor_for
from megatron_pp.runtime.settings import (
    check_communicator,
    checkpoint_flags,
    default_pipeline_group,
    given_step_number,
    group_sizes,
    plan_spec,
    say_if_slow,
    say_once,
    say_what_is_off,
    shapes_vary,
    step_inputs,
    tensor_shapes,
    wanted_plan,
)
from megatron_pp.tracing.profiler_ranges import ranges_if_profiling
from megatron_pp.tracing.recorder import message_bytes, observers, step_recording, trace_folder, trace_steps
from megatron_pp.weight_grad import WeightGradStore, check_wrappers, store_of

_NOT_TRACED = "off"


class StepCall:
    """One call of a schedule function: arguments checked when made, the step executed by ``run``.

    A plug-in for another training stack overrides ``begin``, ``make_steps`` and ``finish``: what runs around and
    within the plan, never the plan.
    """

    def __init__(
        self,
        *,
        chunked: bool,
        alone: bool,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> None:
        self.inputs = step_inputs(
            forward_step_func,
            data_iterator,
            model,
            num_microbatches,
            forward_only,
            collect_non_loss_data,
            first_val_step,
            chunked,
        )
        self.config = self.inputs.config
        self.number = self.step_number()
        # Which steps are traced: traced steps begin with messages that all ranks have to take part in.
        self.traced = f"steps {trace_steps(self.config)}" if trace_folder(self.config) else _NOT_TRACED
        self.alone = alone
        self.pg_collection = pg_collection
        self.force_all_reduce = bool(force_all_reduce)
        self.tp_size, self.cp_size = group_sizes(pg_collection, self.config)
        if adjust_tensor_shapes_fn is not None and (chunked or alone):
            raise ScheduleInputError("adjust_tensor_shapes_fn is for pipelines with one model chunk a rank")
        group = self._pipeline_group(p2p_communicator)
        pipeline_size = 1 if group is None else group.size()
        if alone and pipeline_size > 1:
            raise ScheduleInputError(
                f"forward_backward_no_pipelining was called in a pipeline of {pipeline_size} ranks; call what "
                f"get_forward_backward_func({pipeline_size}) returns"
            )
        self.weights = store_of(self.inputs.chunks)
        wanted = wanted_plan(self.inputs, pipeline_size, self.weights is not None)
        self.shapes = self._shapes(
            pipeline_size, seq_length, micro_batch_size, decoder_seq_length, adjust_tensor_shapes_fn
        )
        # From here on there may be communication: on NCCL, a new communicator is made by all ranks together.
        self.communicator = self._communicator(p2p_communicator, group)
        check_communicator(self.communicator.shapes_vary, self.config)
        self.spec = plan_spec(wanted, self.communicator.variable_shapes, self.communicator.transport.pollable)
        if pipeline_size > 1:
            say_if_slow(self.spec)

    def run(self) -> list[Any]:
        """The whole step. Returns what the loss function reported."""
        self.begin()
        plan = build_plan(self.spec, self._announce)
        steps = self.make_steps(plan)
        size = message_bytes(self.shapes.send, self.communicator.dtype)
        recording = None
        if self.traced != _NOT_TRACED:
            recording = step_recording(self.inputs.chunks[0], self.config, plan, self.communicator.transport, size)
        executor = executor_for(self.communicator)(
            plan,
            self.communicator,
            self._named(steps, plan),
            SyncHooks(self.config, self.inputs.chunks, not prepares_in_forward(plan, self.communicator.rank)),
            self.shapes,
            deallocate=getattr(self.config, "deallocate_pipeline_outputs", True),
            max_pending_sends=getattr(self.config, "max_pending_sends", 2),
            weights=self._weights(plan),
            pair_runner=self._pair_runner(),
            observer=observers(recording, ranges_if_profiling()),
        )
        if self.communicator.wire is not None:
            self.communicator.wire.source = executor
        agreed = (self.spec, self.shapes, self.traced, self.communicator.dtype, self.communicator.wire is not None)
        with guarded(self.communicator, self.config, executor, agreed, self.describe, self.number) as guard:
            received = message_bytes(self.shapes.receive, self.communicator.dtype)
            self.communicator.prepare(plan.placement.rank_edges, received, size)
            if recording is not None:
                recording.start()
            executor.run()
            if recording is not None:
                recording.finish()
            guard.phase("the work after the plan (gradient synchronisation and finalisation)")
            self.finish(steps)
        return steps.record.data

    def describe(self) -> dict[str, str]:
        """What all ranks of the pipeline have to agree on, as text; compared when it changes."""
        described = describe_step(self.spec, self.shapes, self.communicator.dtype)
        checked = str(self.communicator.wire is not None)
        return {"p2p_debug": checked, **described, "tracing (trace_dir, trace_steps)": self.traced}

    def step_number(self) -> int | None:
        """The program's own number of this step, which all ranks compare; None where it gives none."""
        return given_step_number(self.config)

    def begin(self) -> None:
        """Before the first instruction."""
        timers = getattr(self.config, "timers", None)
        if timers is not None:
            barrier = getattr(self.config, "barrier_with_L1_time", True)
            timers("forward-backward", log_level=1).start(barrier=barrier)

    def finish(self, steps: Any) -> None:
        """After the last instruction: gradients are finalised, the timer stops."""
        if not self.spec.forward_only:
            finalize_gradients(
                self.config,
                self.inputs.chunks,
                steps.record.num_tokens,
                self.communicator.device,
                self.pg_collection,
                self.force_all_reduce,
            )
        self.stop_timer()

    def stop_timer(self) -> None:
        timers = getattr(self.config, "timers", None)
        if timers is not None:
            timers("forward-backward").stop()

    def _pipeline_group(self, given: Any) -> Any:
        """The pipeline group of the caller's communicator or collection, or the default one; None for a rank alone."""
        if isinstance(given, P2PCommunicator):
            return given.pp_group
        group = getattr(given, "pp_group", None) or getattr(self.pg_collection, "pp", None)
        if group is None and self.alone and not parallel_state.model_parallel_is_initialized():
            return None
        return group or default_pipeline_group()

    def _communicator(self, given: Any, group: Any) -> P2PCommunicator:
        if isinstance(given, P2PCommunicator):
            return given
        return communicator_for(group, self.config) if group else lone_communicator(self.config, self.inputs.chunks[0])

    def _shapes(
        self,
        pipeline_size: int,
        seq_length: Any,
        micro_batch_size: Any,
        decoder_seq_length: Any,
        adjust: Callable[..., Any] | None,
    ) -> Shapes:
        receive: Any = [None]
        needed = pipeline_size > 1 and not shapes_vary(self.config)
        if needed or (adjust is not None and seq_length is not None):
            receive = tensor_shapes(
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                config=self.config,
                tp_size=self.tp_size,
                cp_size=self.cp_size,
            )
        send = list(receive)
        if adjust is not None:
            receive, send = adjust(receive, send)
        self.names = names_of(receive), names_of(send)
        listed = [shapes_of(shapes) for shapes in (receive, send)]
        return Shapes(*(shapes[0] if len(shapes) == 1 else shapes for shapes in listed))

    def _weights(self, plan: Plan) -> WeightGradStore | None:
        """Where the chunks were converted, what holds the weight gradients that they put off."""
        if not plan.spec.forward_only:
            say_what_is_off(plan, self.weights is not None)
        if self.weights is not None:
            check_wrappers(self.weights, self.inputs.chunks)
        return self.weights

    def _announce(self, sentence: str) -> None:
        """For the log, once per job."""
        if self.communicator.transport.global_rank(self.communicator.rank) == 0:
            say_once(sentence)

    def _pair_runner(self) -> PairRunner | None:
        function = getattr(self.config, "overlapped_forward_backward", None)
        return None if function is None else PairRunner(function, self.inputs.chunks)

    def _named(self, steps: Any, plan: Plan) -> Any:
        """The steps, or, where the stages give each other dicts, the steps behind an adapter."""
        received, sent = self.names
        if received is None and sent is None:
            return steps
        return NamedSteps(steps, received, sent, self.step_options(plan).is_last_stage)

    def make_steps(self, plan: Plan) -> Any:
        """What runs a microbatch through a chunk. A subclass may bring its own."""
        inputs = self.inputs
        return ModelSteps(
            inputs.forward_step_func, inputs.data_iterators, inputs.chunks, self.config, self.step_options(plan)
        )

    def step_options(self, plan: Plan) -> StepOptions:
        inputs, rank = self.inputs, self.communicator.rank
        return StepOptions(
            num_microbatches=inputs.num_microbatches,
            is_last_stage=[plan.placement.is_last_stage(rank, chunk) for chunk in range(len(inputs.chunks))],
            device_type=self.communicator.device.type,
            cp_size=self.cp_size,
            forward_only=inputs.forward_only,
            collect_non_loss_data=inputs.collect_non_loss_data,
            first_val_step=inputs.first_val_step,
            # Megatron's schedule without a pipeline passes no such flag.
            checkpoint_flags=None
            if self.alone
            else checkpoint_flags(self.config, plan.orders[rank], inputs.forward_only),
        )
