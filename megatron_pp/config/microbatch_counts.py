"""Which numbers of microbatches run at full speed. Never imports torch.

Every count of at least 1 is legal here. Megatron refuses two kinds that are merely slower: fewer microbatches than
ranks, and an interleaved schedule whose last group has fewer microbatches than there are ranks (its rule is in
`forward_backward_pipelining_with_interleaving`).
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_pp.config.checks import whole_number
from megatron_pp.config.nearest import nearest
from megatron_pp.config.rules import check_group_size, runs_at_full_speed
from megatron_pp.errors import MicrobatchCountError


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


@lru_cache(maxsize=128)
def slow_count(*sizes: int) -> str:
    """The sentence of a count that is not at full speed; ``sizes``: M, P, V and G."""
    return explain_microbatch_count(*sizes).sentence


def explain_microbatch_count(
    num_microbatches: int, pipeline_size: int, num_chunks: int = 1, group_size: int | None = None
) -> MicrobatchCount:
    """The effect of M microbatches over P ranks with V chunks each, in groups of G (default P).

    Groups matter to interleaved schedules only; for others leave ``num_chunks`` at 1.

    Raises MicrobatchCountError unless M is an int of at least 1, and ConfigError for a group size below P with V > 1
    or sizes below 1."""
    whole_number("num_microbatches", num_microbatches, error=MicrobatchCountError)
    group = check_group_size(pipeline_size, num_chunks, group_size)

    def runs_full(count: int) -> bool:
        return runs_at_full_speed(count, pipeline_size, num_chunks, group)

    sentence = f"{num_microbatches} microbatches over {pipeline_size} ranks"
    if runs_full(num_microbatches):
        return MicrobatchCount(num_microbatches, True, (num_microbatches,), f"{sentence} run at full speed")
    if num_microbatches < pipeline_size:
        reason = "fewer microbatches than ranks never fill the pipeline"
    else:
        last = f"{num_microbatches % group} of {group} microbatches"
        reason = f"the last group has {last}, fewer than the ranks, which then wait"
    fast = nearest(num_microbatches, runs_full)
    sentence = f"{sentence} work, slower: {reason}; nearest at full speed: {' and '.join(map(str, fast))}"
    return MicrobatchCount(num_microbatches, False, fast, sentence)
