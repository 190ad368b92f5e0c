"""Which numbers of microbatches a pipeline can run, and which of them at full speed. Never imports torch.

Every count of at least 1 is legal here. Megatron refuses two kinds that are merely slower: fewer microbatches than
ranks, and an interleaved schedule whose last group has fewer microbatches than there are ranks (its rule is in
`forward_backward_pipelining_with_interleaving`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp.config.checks import whole_number
from megatron_pp.errors import ConfigError, MicrobatchCountError


@dataclass(frozen=True)
class MicrobatchCount:
    """The effect of one legal number of microbatches on speed.

    count       M
    full_speed  the pipeline fills, and no rank idles longer than the schedule's own bubble
    nearest     the full-speed counts around M (below, above), or M alone
    sentence    the same in words, for the log
    """

    count: int
    full_speed: bool
    nearest: tuple[int, ...]
    sentence: str


def explain_microbatch_count(
    num_microbatches: int, pipeline_size: int, num_chunks: int = 1, group_size: int | None = None
) -> MicrobatchCount:
    """The verdict on M microbatches over P ranks with V chunks each, in groups of G (default P).

    Groups matter to interleaved schedules only; for others leave ``num_chunks`` at 1.

    Raises MicrobatchCountError unless M is an int of at least 1, and ConfigError for a group size below P with V > 1
    or sizes below 1.
    """
    whole_number("num_microbatches", num_microbatches, error=MicrobatchCountError)
    group = check_group_size(pipeline_size, num_chunks, group_size)
    runs_full = _full_speed_rule(pipeline_size, num_chunks, group)
    if runs_full(num_microbatches):
        sentence = f"{num_microbatches} microbatches over {pipeline_size} ranks run at full speed"
        return MicrobatchCount(num_microbatches, True, (num_microbatches,), sentence)
    nearest = _nearest(num_microbatches, runs_full)
    reason = _reason(num_microbatches, pipeline_size, group)
    legal = " and ".join(map(str, nearest))
    sentence = (
        f"{num_microbatches} microbatches over {pipeline_size} ranks work, slower: {reason}; "
        f"nearest at full speed: {legal}"
    )
    return MicrobatchCount(num_microbatches, False, nearest, sentence)


def legal_microbatch_counts(
    pipeline_size: int, num_chunks: int = 1, group_size: int | None = None, *, at_most: int
) -> list[MicrobatchCount]:
    """The verdicts on M = 1 ... ``at_most``; every one of them is legal. Raises as explain_microbatch_count does."""
    return [explain_microbatch_count(m, pipeline_size, num_chunks, group_size) for m in range(1, at_most + 1)]


def check_group_size(pipeline_size: int, num_chunks: int, group_size: int | None) -> int:
    """The group size in use: P where ``group_size`` is None.

    A group larger than M is M; a group smaller than P leaves ranks waiting for their own output in every group, for
    no gain, and is refused as in Megatron.

    Raises ConfigError with the nearest legal value.
    """
    whole_number("pipeline_model_parallel_size", pipeline_size)
    whole_number("virtual_pipeline_model_parallel_size", num_chunks)
    if group_size is None:
        return pipeline_size
    group_size = whole_number("microbatch_group_size_per_vp_stage", group_size, hint=f"default {pipeline_size}")
    if num_chunks > 1 and group_size < pipeline_size:
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage is {group_size}; with {pipeline_size} pipeline ranks and {num_chunks} "
            f"chunks each the nearest legal value is {pipeline_size}"
        )
    return group_size


def _full_speed_rule(pipeline_size: int, num_chunks: int, group: int) -> Callable[[int], bool]:
    def runs_full(count: int) -> bool:
        if count < pipeline_size:
            return pipeline_size == 1
        last_group = count % group
        return num_chunks == 1 or last_group == 0 or last_group >= pipeline_size

    return runs_full


def _nearest(count: int, runs_full: Callable[[int], bool]) -> tuple[int, ...]:
    below = next((m for m in range(count - 1, 0, -1) if runs_full(m)), None)
    above = count + 1
    while not runs_full(above):
        above += 1
    return (above,) if below is None else (below, above)


def _reason(count: int, pipeline_size: int, group: int) -> str:
    if count < pipeline_size:
        return "fewer microbatches than ranks never fill the pipeline"
    return f"the last group has {count % group} of {group} microbatches, fewer than the ranks, which then wait"
