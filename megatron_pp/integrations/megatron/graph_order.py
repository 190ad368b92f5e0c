"""Compares a plan's order with the order in which Megatron captures CUDA graphs of layers, or copies activations back.

In the order of capture a microbatch's graphs reuse the memory of a microbatch that is over by then. Replayed in another
order, they overwrite memory that is still needed. Transformer Engine's graphs (``make_graphed_callables(_order=...)``)
are captured in the order of Megatron's own schedules (``get_schedule_table``, ``convert_schedule_table_to_order``),
whatever schedule runs later. Megatron's own graphs are captured in the order of the first training step
(``_CudagraphGlobalRecord``).

Fine-grained offloading copies activations back in the backward order of Megatron's schedules: the k-th backward gets
the activations of the k-th forward in that order, whichever backward it is (``PipelineOffloadManager.flush``).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import chain, zip_longest
from operator import methodcaller
from typing import Any

from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import LAYER_GRAPHS, TE_GRAPHS
from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, Instruction, unjoined
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime.engine.compute import each_tensor
from megatron_pp.tracing.step_observer import StepObserver


def step_observer(step: Any) -> StepObserver | None:
    """The observer that keeps the graphs of a step's model in order; None if none is needed. Raises ScheduleInputError
    on all ranks alike if graphs, or copies of activations, would be out of order."""
    spec = step.draft
    settings = step.settings
    interleaved = settings.virtual_pipeline_model_parallel_size is not None
    group = getattr(step.config, "microbatch_group_size_per_vp_stage", None) or 0  # Megatron reads no other setting
    if settings.fine_grained_activation_offloading:
        check_offload_order(spec, interleaved, group)
    if settings.cuda_graph_impl not in LAYER_GRAPHS:
        return None
    if step.joins:  # Megatron's own graphs are outside of schedule plans
        if settings.cuda_graph_impl == TE_GRAPHS:
            check_graph_order(spec, interleaved, group)
        return None
    if spec.pipeline_size == 1:
        return None
    if step.weights is not None and not spec.forward_only and find_family(spec.schedule).splits_weight:
        raise ScheduleInputError(
            f"config.cuda_graph_impl is {settings.cuda_graph_impl!r}, whose graphs run backwards whole, and schedule "
            f"{spec.schedule} splits them; choose a schedule that does not, or leave the graphs out"
        )
    if settings.cuda_graph_impl == TE_GRAPHS:
        check_graph_order(spec, interleaved, group)
        return None
    graphs = _LOCAL_GRAPHS.setdefault(step.inputs.chunks[0], LocalGraphs())
    graphs.check(spec)
    return graphs


class LocalGraphs(StepObserver):
    """The graphs that Megatron itself captures of one model. Each microbatch has its own; they are used in turn."""

    def __init__(self) -> None:
        self.captured: PlanSpec | None = None  # the plan in whose order the graphs were captured

    def check(self, spec: PlanSpec) -> None:
        """Raises ScheduleInputError if a step of ``spec`` would replay graphs in another order."""
        theirs = self.captured
        why = None
        if spec.joins:
            why = "the two halves of a pair (overlapped_forward_backward) run at the same time"
        elif theirs is None:
            return
        elif spec.forward_only and spec.num_microbatches % theirs.num_microbatches:
            why = f"an evaluation of {spec.num_microbatches} microbatches leaves them out of turn"
        elif not spec.forward_only and spec != theirs and _runs(spec) != _runs(theirs):
            why = "this step has another order of forwards and backwards"
        if why is not None:
            order = (
                "" if theirs is None else f" of {theirs.num_microbatches} microbatches in schedule {theirs.schedule}"
            )
            raise ScheduleInputError(
                f"config.cuda_graph_impl is 'local', and {why}: replayed in another order than that of the first "
                f"training step{order}, graphs overwrite each other's buffers. Keep the schedule and the number of "
                "microbatches (in evaluation a multiple of it), or leave the graphs out"
            )

    def watch(self, engine: Any) -> None:
        """In evaluation, protect outputs that are being sent: no backward delays the next graphs, which overwrite
        them."""
        if self.captured is not None and engine.plan.spec.forward_only:
            engine.features = [_CopiedOutputs(), *engine.features]

    def after_step(self, step: Any, plan: Any, guard: Any) -> None:
        if self.captured is None and not plan.spec.forward_only:
            self.captured = plan.spec


# Each belongs to a model, and is dropped with it.
_LOCAL_GRAPHS: ObjectTable[LocalGraphs] = ObjectTable()


class _CopiedOutputs:
    """The part of the engine that gives copies of what a chunk has returned."""

    tables: Mapping[str, Mapping[Any, Any]] = {}

    def attach(self, engine: Any, handlers: Any) -> None:
        engine.calls.forward = partial(self._copy_of_forward, engine.calls.forward)

    @staticmethod
    def _copy_of_forward(call: Callable[..., Any], at: Any, given: Any) -> Any:
        return each_tensor(methodcaller("clone"), call(at, given))


def _runs(spec: PlanSpec) -> list[list[Instruction]]:
    """The forwards and backwards of each rank, in order."""
    return [_of_order(order) for order in build_plan(spec).orders]


def _of_order(order: Any) -> list[Instruction]:
    return [at for at in unjoined(order) if at.op == FORWARD or at.op in BACKWARD_OPS]


def check_graph_order(spec: PlanSpec, interleaved: bool, group_size: int = 0) -> None:
    """Raises ScheduleInputError on all ranks alike if a rank's forwards and backwards in the plan of ``spec`` have
    another order than its graphs were captured in. ``interleaved``: they were captured by Megatron's schedule for model
    chunks, in groups of ``group_size`` microbatches (0: the plan's group size)."""
    difference = None if spec.forward_only else _difference(spec, interleaved, group_size or spec.group_size)
    if difference is not None:
        raise ScheduleInputError(
            f"config.cuda_graph_impl is {TE_GRAPHS!r}, and {difference} in the order of capture: replayed in another "
            "order, graphs overwrite each other's buffers. Choose the schedule of the capture (1f1b, "
            "interleaved_1f1b with model chunks and full groups of microbatches, combined_1f1b with pairs), or leave "
            "the graphs out"
        )


def check_offload_order(spec: PlanSpec, interleaved: bool, group_size: int = 0) -> None:
    """Check the order of ``fine_grained_activation_offloading``. It compares forwards with forwards, and
    backwards with backwards."""
    if spec.forward_only or spec.pipeline_size == 1:
        return
    difference = _difference(spec, interleaved, group_size or spec.group_size, offloads=True)
    if difference is not None:
        raise ScheduleInputError(
            f"config.fine_grained_activation_offloading is set, and {difference} in Megatron's: in another order, "
            "backwards get the activations of other microbatches. Choose a schedule with Megatron's order of forwards "
            "and of backwards (1f1b, interleaved_1f1b), config.offload_chunks in place of it, or leave it out"
        )


@lru_cache(maxsize=64)
def _difference(spec: PlanSpec, interleaved: bool, group_size: int, offloads: bool = False) -> str | None:
    plan = build_plan(spec)
    for rank, order in enumerate(plan.programs if spec.joins else plan.orders):
        captured = captured_order(
            *(spec.pipeline_size, rank, spec.num_chunks, spec.num_microbatches, group_size, interleaved),
            joined=spec.joins,
        )
        runs = [numbers for numbers in map(_numbers, order) if numbers]
        if offloads:
            runs, captured = _by_direction(runs), _by_direction(captured)
        for position, (ours, theirs) in enumerate(zip_longest(runs, captured, fillvalue=())):
            if ours != theirs:
                return (
                    f"operation {position} of pipeline rank {rank} is the {_words(ours)} in schedule {spec.schedule}, "
                    f"and the {_words(theirs)}"
                )
    return None


def _numbers(entry: Any) -> tuple[int, ...]:
    """The numbers of an operation, or of the two halves of a pair, as `captured_order` writes them."""
    return tuple(at.chunk + 1 if at.op == FORWARD else -at.chunk - 1 for at in _of_order([entry]))


def _by_direction(runs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """All forwards, followed by all backwards."""
    return sorted(((one,) for entry in runs for one in entry), key=lambda entry: entry[0] < 0)


def captured_order(
    pipeline_size: int,
    rank: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int = 0,
    interleaved: bool = True,
    joined: bool = False,
) -> list[tuple[int, ...]]:
    """The operations of a rank under Megatron's schedule, in the notation of ``make_graphed_callables``: c + 1 for a
    forward of chunk c, -(c + 1) for a backward. ``group_size``: 0 for the pipeline's size. ``joined``: a forward and a
    backward in a pair are one operation, as in combined 1F1B (``get_overlap_moe_expert_parallel_comm_order``)."""
    group_size = group_size or pipeline_size
    chunks = [
        chunk
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for _ in range(min(group_size, num_microbatches - start))
    ]
    behind = pipeline_size - rank - 1
    warm_up = 2 * behind + (num_chunks - 1) * group_size if interleaved else behind
    warm_up = min(warm_up + joined, len(chunks))
    forwards = [chunk + 1 for chunk in chunks]
    backwards = [chunk - num_chunks for chunk in chunks]
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = pairs if joined else ((one,) for one in chain.from_iterable(pairs))
    alone = [(one,) for one in forwards[:warm_up]]
    return [*alone, *steady, *((one,) for one in backwards[len(chunks) - warm_up :])]


def _words(numbers: tuple[int, ...]) -> str:
    words = [f"{'forward' if number > 0 else 'backward'} of chunk {abs(number) - 1}" for number in numbers]
    return " with the ".join(words) or "end"
