"""Shapes of the messages between stages, from the arguments of a step and the parallel sizes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from megatron_pp.comm import own_groups
from megatron_pp.comm.communicator import is_single_shape
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import P2PShapeError
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.arguments import StepInputs, whole_argument
from megatron_pp.runtime.compute import Names


class Shapes(NamedTuple):
    """Shapes of what this rank receives and sends towards the last stage: one shape or a list of shapes each."""

    receive: Any
    send: Any


class Messages(NamedTuple):
    """Shapes and, where stages give each other dicts, names of what this rank receives and sends."""

    shapes: Shapes
    received: Names
    sent: Names


def messages(
    inputs: StepInputs,
    settings: StepSettings,
    pipeline_size: int,
    between_stages: Callable[[], tuple[list[Any], list[Any]]],
) -> Messages:
    """``between_stages`` gives the shapes of what this rank receives and of what it sends, before
    ``adjust_tensor_shapes_fn``, or (), as Megatron does, for one that travels. It is called where shapes are needed.
    Raises what it raises."""
    receive: list[Any] = [None]
    send: list[Any] = [None]
    adjust = inputs.adjust_tensor_shapes_fn
    if (pipeline_size > 1 and not settings.shapes_vary) or (adjust is not None and inputs.seq_length is not None):
        receive, send = between_stages()
    if adjust is not None:
        receive, send = adjust(receive, send)
    received, shapes_received = _names_and_shapes(receive)
    sent, shapes_sent = _names_and_shapes(send)
    return Messages(Shapes(shapes_received, shapes_sent), received, sent)


def _names_and_shapes(given: Any) -> tuple[Names, Any]:
    """The names (None for a list) and the shapes (one, or a list of several) of what travels."""
    shapes = [None if shape == () else shape for shape in (given.values() if isinstance(given, Mapping) else given)]
    return tuple(given) if isinstance(given, Mapping) else None, shapes[0] if len(shapes) == 1 else shapes


def tensor_shapes(
    seq_length: int | None,
    micro_batch_size: int | None,
    decoder_seq_length: int | None,
    config: Any,
    tp_size: int,
    cp_size: int,
) -> list[tuple[int, int, int]]:
    """Shapes of the activations between stages: [(sequence / cp [/ tp under sequence parallelism], microbatch,
    hidden)]. Raises ScheduleInputError where one of them is unknown."""
    name = "seq_length" if decoder_seq_length is None else "decoder_seq_length"
    given = seq_length if decoder_seq_length is None else decoder_seq_length
    why = "tensors between stages are [seq_length, micro_batch_size, hidden_size] unless config.variable_seq_lengths"
    length = whole_argument(name, given, hint=why) // cp_size
    settings = StepSettings.from_config(config)
    if settings.sequence_parallel:
        length //= tp_size
    micro_batch_size = whole_argument("micro_batch_size", micro_batch_size, hint=why)
    hidden_size = whole_argument("config.hidden_size", settings.hidden_size, hint=why)
    return [(length, micro_batch_size, hidden_size)]


def check_output(at: Task, output: Any, expected: Any, placement: Placement, vary: bool) -> None:
    """The receiver has buffers for what was agreed: on gloo a larger message ends its process, a smaller one passes
    unnoticed, and one that never comes is a timeout.

    ``expected``: the shapes that the next stage receives; ``vary``: their number counts alone. Raises P2PShapeError."""
    if at.stage == placement.num_stages - 1 or not placement.crosses_ranks(at.stage):
        return  # nothing is sent
    tensors = output if isinstance(output, (list, tuple)) else [output]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return  # it is refused when it is sent
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
    found, shapes = [list(t.shape) for t in tensors], [list(shape) for shape in wanted]
    if found != shapes:
        raise P2PShapeError(
            f"{of} has shape {_shown(found)}, but the next stage expects {_shown(shapes)}, from seq_length, "
            "micro_batch_size and hidden_size; where shapes vary, set variable_seq_lengths"
        )


def _shown(shapes: list[list[int]]) -> str:
    return str(shapes[0] if len(shapes) == 1 else shapes)


def group_sizes(pg_collection: Any, settings: StepSettings) -> tuple[int, int]:
    """(tensor, context) parallel sizes: from the process groups where given, from parallel_state where initialised,
    else from the config."""
    tp, cp = getattr(pg_collection, "tp", None), getattr(pg_collection, "cp", None)
    if own_groups.model_parallel_is_initialized():
        tp_default = own_groups.size_of("tp")
        cp_default = own_groups.size_of("cp")
    else:
        tp_default, cp_default = settings.tensor_model_parallel_size, settings.context_parallel_size
    return (tp_default if tp is None else tp.size()), (cp_default if cp is None else cp.size())
