"""Shapes of the messages between stages, from the arguments of a step and the parallel sizes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_pp.config.settings import StepSettings
from megatron_pp.runtime.arguments import StepInputs, whole_argument
from megatron_pp.runtime.engine.compute import Names, Shapes


class Messages(NamedTuple):
    """Shapes of what this rank receives and sends and, if stages pass dicts, the names."""

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
    ``adjust_tensor_shapes_fn``; a shape that is sent ahead of its tensor is (), as in Megatron. It is called only if
    shapes are needed. Raises what it raises."""
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
    """The names (None for a list) and the shapes (one, or a list of several) of a message's tensors."""
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
    hidden)]. Raises ScheduleInputError if one of these sizes is unknown."""
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
