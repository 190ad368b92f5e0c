"""Losses that count tokens, under context parallelism and Megatron-core.

Megatron's schedules divide a shard's loss by the shard's own tokens (NVIDIA/Megatron-LM#7513). The engine does the same
and warns, unless `install(whole_sequence_loss=True)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_pp.common.log_once import warn_once
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.context_parallel_loss import tokens_of_all_shards


def watch_losses(inputs: StepInputs, whole_sequence: bool) -> None:
    """Wrap the loss functions that ``inputs.forward_step_func`` returns: with ``whole_sequence`` they are corrected,
    otherwise the first one that counts tokens causes a warning."""
    if not inputs.collect_non_loss_data:
        inputs.forward_step_func = _ForwardStep(inputs.forward_step_func, whole_sequence, inputs.pg_collection)


@dataclass(frozen=True)
class _ForwardStep:
    theirs: Callable[..., Any]
    whole_sequence: bool
    groups: Any

    def __call__(self, *given: Any, **keywords: Any) -> tuple[Any, Any]:
        output, loss_func = self.theirs(*given, **keywords)
        return output, None if loss_func is None else partial(self._loss, loss_func)

    def _loss(self, loss_func: Callable[..., Any], output: Any) -> Any:
        returned = loss_func(output)
        if not isinstance(returned, (tuple, list)) or len(returned) != 3:
            return returned
        if not self.whole_sequence:
            warn_once(
                "Megatron-core divides the loss of each context-parallel rank by the tokens that this rank counts: "
                "if masks leave the shards of a sequence different numbers of tokens, gradients differ from those "
                "of one process (NVIDIA/Megatron-LM#7513). Set calculate_per_token_loss, or "
                "install(whole_sequence_loss=True)"
            )
            return returned
        loss, tokens, report = returned
        total = tokens_of_all_shards(loss, tokens, self.groups)
        return loss / total.clamp(min=1), report  # Megatron multiplies such a mean by the context-parallel size
