"""The order in which Megatron captures Transformer Engine's CUDA graphs, against that of a plan.

``make_graphed_callables(_order=...)`` gives the graphs of one microbatch the buffers of another that is over by then in
the order of capture; replayed in another order, they overwrite what is still needed. Megatron captures in the order of
its own schedules (``get_schedule_table``, ``convert_schedule_table_to_order``), whatever runs afterwards.
"""

from functools import lru_cache
from itertools import chain

from megatron_pp.config.settings import TE_GRAPHS
from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, without_pairs
from megatron_pp.plan.ir.spec import PlanSpec


def check_graph_order(spec: PlanSpec, interleaved: bool) -> None:
    """Raises ScheduleInputError, on all ranks alike, where a rank's forwards and backwards in the plan of ``spec`` are
    in another order than its graphs were captured in. ``interleaved``: by Megatron's schedule for model chunks."""
    difference = None if spec.pipeline_size == 1 or spec.forward_only else _difference(spec, interleaved)
    if difference is not None:
        raise ScheduleInputError(
            f"config.cuda_graph_impl is {TE_GRAPHS!r}, and {difference}: replayed in another order, graphs overwrite "
            "each other's buffers. Choose the schedule of the capture (1f1b, or interleaved_1f1b with model chunks and "
            "full groups of microbatches), or leave the graphs out"
        )


@lru_cache(maxsize=64)
def _difference(spec: PlanSpec, interleaved: bool) -> str | None:
    for rank, order in enumerate(build_plan(spec).orders):
        runs = [
            at.chunk + 1 if at.op == FORWARD else -at.chunk - 1
            for at in without_pairs(order)
            if at.op == FORWARD or at.op in BACKWARD_OPS
        ]
        captured = captured_order(
            spec.pipeline_size, rank, spec.num_chunks, spec.num_microbatches, spec.group_size, interleaved
        )
        for position, (ours, theirs) in enumerate(zip(runs, captured, strict=True)):
            if ours != theirs:
                return (
                    f"operation {position} of pipeline rank {rank} is the {_words(ours)} in schedule "
                    f"{spec.schedule}, where the graphs were captured for the {_words(theirs)}"
                )
    return None


def captured_order(
    pipeline_size: int, rank: int, num_chunks: int, num_microbatches: int, group_size: int = 0, interleaved: bool = True
) -> list[int]:
    """Operations of a rank of Megatron's schedule, in the notation of ``make_graphed_callables``: c + 1 for a forward
    of chunk c, -(c + 1) for a backward. ``group_size``: 0 for the pipeline's size."""
    group_size = group_size or pipeline_size
    chunks = [
        chunk
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for _ in range(min(group_size, num_microbatches - start))
    ]
    behind = pipeline_size - rank - 1
    warm_up = 2 * behind + (num_chunks - 1) * group_size if interleaved else behind
    warm_up = min(warm_up, len(chunks))
    forwards, backwards = [chunk + 1 for chunk in chunks], [chunk - num_chunks for chunk in chunks]
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return [*forwards[:warm_up], *steady, *backwards[len(chunks) - warm_up :]]


def _words(number: int) -> str:
    return f"{'forward' if number > 0 else 'backward'} of chunk {abs(number) - 1}"
