"""Losses of context-parallel ranks, each of which has a shard of every sequence, divided as for whole sequences.

A loss function that returns (sum, tokens, report) counts the tokens of its own shard. If the sum is divided by these, a
token weighs more in a shard with fewer tokens. So masks that leave shards different numbers of tokens change the
gradients (NVIDIA/Megatron-LM#7513). Here the sum is divided by the tokens of the whole sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.comm import own_groups
from megatron_pp.errors import ScheduleInputError


def tokens_of_all_shards(loss: torch.Tensor, tokens: Any, groups: Any) -> torch.Tensor:
    """The sum of ``tokens`` (an int, or an integer tensor) over the context-parallel ranks, on the device of ``loss``:
    an all-reduce of one number. The group is ``groups.cp``, or else the one of parallel_state.

    Raises ScheduleInputError if the group is not known."""
    group = getattr(groups, "cp", None)
    if group is None and own_groups.model_parallel_is_initialized():
        group = own_groups.group_of("cp")
    if group is None:
        raise ScheduleInputError(
            "the loss function returned (loss, num_tokens, report) and context_parallel_size is over 1, so the tokens "
            "of all shards are needed, but the context-parallel group is not known; give the schedule a pg_collection "
            "with cp, call initialize_model_parallel, or return (loss, report)"
        )
    total = torch.as_tensor(tokens, device=loss.device).clone()
    dist.all_reduce(total, group=group)
    return total


@dataclass(frozen=True)
class WholeSequence:
    """``StepOptions.whole_sequence`` of a training step with context parallelism; ``groups`` is its pg_collection."""

    groups: Any
    cp_size: int

    def __call__(self, loss: torch.Tensor, tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the shard's sum times the context-parallel size, because data-parallel reduction takes the mean over
        these ranks too, and the tokens of all shards."""
        return loss * self.cp_size, tokens_of_all_shards(loss, tokens, self.groups)
