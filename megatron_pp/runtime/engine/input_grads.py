"""Input gradients that are not one contiguous tensor: some may be None, and there may be several."""

from typing import Any

import torch

from megatron_pp.common.log_once import warn_once
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.compute import Activation, each_tensor, in_one_block


def ready_to_send(grad: Activation, given: Activation, at: Task) -> Activation:
    """The gradients ``grad`` of the input ``given`` as they can be sent to the rank of the stage before. That rank has
    posted a receive, so it gets zeros in place of None."""
    if not _is_any_there(grad):
        warn_once(
            f"stage {at.stage} does not use its input: the rank of the stage before gets gradients of zero. "
            "One process would leave them None; with gradients of zero an optimizer may still decay weights or "
            "move by momentum"
        )
    if isinstance(given, (list, tuple)):
        grad = [torch.zeros_like(x) if g is None else g for g, x in zip(grad, given, strict=True)]
    return torch.zeros_like(given) if grad is None else each_tensor(in_one_block, grad)


def used_outputs(outputs: Activation, grads: list[Any]) -> tuple[Activation, Activation]:
    """The outputs of a hand-off on one rank that the next stage has used, with their gradients. None for the gradients
    if it has used none."""
    if not _is_any_there(grads):
        return outputs, None
    used = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    return [output for output, _ in used], [grad for _, grad in used]


def _is_any_there(grad: Activation) -> bool:
    return any(g is not None for g in grad) if isinstance(grad, list) else grad is not None
