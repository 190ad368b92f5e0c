"""The entry points that a Megatron user calls. Each is short: check the arguments, choose a plan, run it.

Signatures and semantics are Megatron-core's. One engine (``engine.py``) runs every schedule; it waits on a send's
handle before it gives an output's data back, in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from typing_extensions import Unpack

from megatron_pp import parallel_state
from megatron_pp.communicators import communicator_for, lone_communicator
from megatron_pp.engine import Shapes
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.wiring import describe_step, guarded
from megatron_pp.finalize import finalize_gradients
from megatron_pp.named_tensors import NamedSteps, names_of, shapes_of
from megatron_pp.output_lifetime import custom_backward, deallocate_output_tensor
from megatron_pp.overlap import PairRunner
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.p2p_debug import executor_for
from megatron_pp.plan.build import build_plan
from megatron_pp.plan.orders.family import Shape
from megatron_pp.plan.orders.loop import schedule_table, warmup_forwards
from megatron_pp.plan.spec import Plan
from megatron_pp.plan.sync_marks import prepares_in_forward
from megatron_pp.profiler_ranges import ranges_if_profiling
from megatron_pp.schedule_inputs import (
    check_communicator,
    check_keywords,
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
from megatron_pp.steps import ModelSteps, StepOptions, backward_step, forward_step
from megatron_pp.sync_hooks import SyncHooks
from megatron_pp.trace import message_bytes, observers, step_recording, trace_folder, trace_steps
from megatron_pp.weight_grad import WeightGradStore, check_wrappers, store_of

__all__ = [
    "P2PCommunicator",
    "backward_step",
    "custom_backward",
    "deallocate_output_tensor",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_step",
    "get_forward_backward_func",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "get_tensor_shapes",
]

_NOT_TRACED = "off"

ForwardBackward = Callable[..., list[Any]]


class StepArguments(TypedDict, total=False):
    """The keyword arguments of the schedule functions; what each means is told at ``get_forward_backward_func``. The
    first four are required.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int | None
    micro_batch_size: int | None
    decoder_seq_length: int | None
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    adjust_tensor_shapes_fn: Callable[..., Any] | None
    p2p_communicator: Any
    pg_collection: Any
    force_all_reduce: bool


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> ForwardBackward:
    """The schedule function for a pipeline of ``pp_size`` ranks with ``vp_size`` model chunks each.

    With neither given, both are taken from ``parallel_state``. The function takes keyword arguments only:

    forward_step_func      (data_iterator, model[, checkpoint_activations_microbatch]) -> (output, loss_func); on the
                           last stage loss_func(output) -> (loss, report) or (loss, num_tokens, report); None reports
                           the output itself
    data_iterator, model   one, or with chunks a list of ``vp_size``
    num_microbatches       M >= 1
    seq_length, micro_batch_size   tensors between stages are [seq_length / cp [/ tp], micro_batch_size, hidden_size]
    decoder_seq_length     used instead of seq_length where given
    forward_only           evaluation: no graph is built, no gradient touched
    collect_non_loss_data  loss_func(output, non_loss_data=True) is reported
    first_val_step         FP8 weights are refreshed on the first validation step only
    adjust_tensor_shapes_fn   (receive shapes, send shapes) -> the same adjusted, one per tensor, or as dicts of
                           name -> shape for stages that give each other dicts; not with chunks
    p2p_communicator, pg_collection   the pipeline group to use; by default parallel_state's
    force_all_reduce       handed to config.finalize_model_grads_func

    and returns what the loss function reported, in the order of the microbatches, on the last stage; an empty list
    elsewhere. Raises ScheduleInputError before any communication for impossible arguments.
    """
    if pp_size is None and vp_size is None:
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if vp_size is not None and vp_size > 1:
        return forward_backward_pipelining_with_interleaving
    if pp_size is not None and pp_size > 1:
        return (
            forward_backward_pipelining_without_interleaving
            if vp_size is None
            else forward_backward_pipelining_with_interleaving
        )
    return forward_backward_no_pipelining


def forward_backward_no_pipelining(**arguments: Unpack[StepArguments]) -> list[Any]:
    """All microbatches through the whole model on this rank: forward and backward in turn. Arguments:
    get_forward_backward_func.
    """
    check_keywords("forward_backward_no_pipelining", arguments, StepArguments.__annotations__)
    return StepCall(chunked=False, alone=True, **arguments).run()


def forward_backward_pipelining_without_interleaving(**arguments: Unpack[StepArguments]) -> list[Any]:
    """One model chunk a rank, 1F1B unless the config names another schedule. Arguments: get_forward_backward_func."""
    check_keywords("forward_backward_pipelining_without_interleaving", arguments, StepArguments.__annotations__)
    return StepCall(chunked=False, alone=False, **arguments).run()


def forward_backward_pipelining_with_interleaving(**arguments: Unpack[StepArguments]) -> list[Any]:
    """A list of model chunks a rank, interleaved 1F1B unless the config names another schedule. Arguments:
    get_forward_backward_func.
    """
    check_keywords("forward_backward_pipelining_with_interleaving", arguments, StepArguments.__annotations__)
    return StepCall(chunked=True, alone=False, **arguments).run()


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
        group = p2p_communicator.pp_group
        size, rank, chunked = (
            group.size(),
            group.rank(),
            p2p_communicator.virtual_pipeline_model_parallel_size is not None,
        )
    else:
        size, rank = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        chunked = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
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
    return tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_size=tp_group.size(),
        cp_size=cp_group.size(),
    )


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
