"""Compares an output with the shapes that the next stage expects, in the cases that the engine's quick check skips."""

from typing import Any

import torch

from megatron_pp.comm.communicator import is_single_shape
from megatron_pp.errors import P2PShapeError
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.tasks import Task


def check_output(at: Task, output: Any, expected: Any, placement: Placement, vary: bool) -> None:
    """Raises P2PShapeError for another number of tensors or, unless shapes ``vary``, other shapes than ``expected``,
    those that the next stage receives.

    The receiver's buffers have these shapes. On gloo a larger message ends the receiver's process, a smaller one is not
    noticed, and a missing one is a timeout."""
    if at.stage == placement.num_stages - 1 or not placement.crosses_ranks(at.stage):
        return  # nothing is sent
    tensors = output if isinstance(output, (list, tuple)) else [output]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return  # the send rejects it
    wanted = [expected] if expected is None or is_single_shape(expected) else expected
    of = f"the output of chunk {at.chunk} for microbatch {at.mb}"
    if len(tensors) != len(wanted):
        kind = f"is a {type(output).__name__} of {len(tensors)} tensors" if tensors is output else "is one tensor"
        raise P2PShapeError(
            f"{of} {kind}, but the next stage expects {len(wanted)}; if a stage gives several, "
            "say how many with adjust_tensor_shapes_fn"
        )
    if vary or expected in (None, []):
        return
    found = [list(t.shape) for t in tensors]
    shapes = [list(shape) for shape in wanted]
    if found != shapes:
        raise P2PShapeError(
            f"{of} has shape {_shown(found)}, but the next stage expects {_shown(shapes)}, from seq_length, "
            "micro_batch_size and hidden_size; where shapes vary, set variable_seq_lengths"
        )


def _shown(shapes: list[list[int]]) -> str:
    return str(shapes[0] if len(shapes) == 1 else shapes)
